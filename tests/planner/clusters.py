"""Hand-made clusters whose best layout is known."""

from ridgeline.configs.cluster import ClusterConfig, LinkLevel
from ridgeline.configs.load import load
from ridgeline.configs.schema import DataConfig
from ridgeline.planner.calibration import load_calibration

CALIBRATION = load_calibration()


def cluster(**change):
    """Nodes of 8 H100 with NVLink inside and one 400 Gb/s port per GPU, with changes."""
    base = {
        "name": "planted",
        "device": "h100-sxm",
        "devices_per_node": 8,
        "cores_per_node": 64,
        "memory_per_node_gib": 1024,
        "links": links(),
        "nic_gb_per_s": 400.0,
        "price_per_device_hour_usd": 3.0,
    }
    return ClusterConfig(**(base | change))


def links(nvlink=450.0, domain=8, network=50.0):
    return [
        LinkLevel(name="nvlink", kind="nvlink", devices=domain, bandwidth_gb_per_s=nvlink, latency_us=2.0),
        LinkLevel(name="network", kind="network", bandwidth_gb_per_s=network, latency_us=5.0),
    ]


def config(model="models/llama-3.1-8b", rows=128, length=4096, *overrides):
    resolved = load(model, overrides).config
    return resolved.model_copy(update={"data": DataConfig(seq_len=length, batch_size=rows, document_masking=False)})
