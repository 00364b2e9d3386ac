"""Small models of three families, shaped as GPU kernels want them, and clusters to compile them for."""

from ridgeline.configs.cluster import ClusterConfig, LinkLevel
from ridgeline.configs.load import load

COMMON = ("mesh.fsdp=1", "precision.compute=bfloat16", "data.seq_len=512", "data.batch_size=16")
QUICK = ("--xla_gpu_enable_triton_gemm=false",)
"""Flags of a compile whose matmul kernels nobody looks at: cuBLAS calls instead of generated code, a third of the time less."""
SHAPES = {
    "llama": ("models/llama-3.2-1b", "num_layers=2", "embed_dim=512", "num_heads=8", "num_kv_heads=4", "head_dim=64", "mlp_dim=1536"),
    "qwen3": ("models/qwen3-0.6b", "num_layers=2", "embed_dim=512", "num_heads=8", "num_kv_heads=4", "head_dim=128", "mlp_dim=1024"),
    "gpt2": ("models/gpt2", "num_layers=2", "embed_dim=512", "num_heads=8", "mlp_dim=2048", "max_seq_len=512"),
}
OTHERS = {
    "experts": (
        *("models/qwen3-30b-a3b", "num_layers=2", "embed_dim=512", "num_heads=8", "num_kv_heads=4", "head_dim=128"),
        *("moe.experts=16", "moe.experts_per_token=2", "moe.expert_dim=256"),
    ),
    "gemma2": ("models/gemma2-2b", "num_layers=6", "embed_dim=512", "num_heads=4", "num_kv_heads=2", "head_dim=128", "mlp_dim=1024"),
    "gpt-oss": (
        *("models/gpt-oss-20b", "num_layers=4", "embed_dim=512", "num_heads=8", "num_kv_heads=4", "head_dim=64"),
        *("moe.experts=16", "moe.experts_per_token=2", "moe.expert_dim=256"),
    ),
    "llama4": (
        *("models/llama-4-scout-17b-16e", "num_layers=8", "embed_dim=512", "num_heads=8", "num_kv_heads=4", "head_dim=128"),
        *("moe.experts=16", "moe.expert_dim=256"),
    ),
    "olmo3": ("models/olmo3-7b", "num_layers=8", "embed_dim=512", "num_heads=4", "num_kv_heads=4", "head_dim=128", "mlp_dim=1024"),
}
"""Small models with experts, or with several kinds of layers."""


def small(family, *overrides):
    """A small model of a family; tied embeddings and what else makes the family are kept."""
    base, *shape = (SHAPES | OTHERS)[family]
    settings = [f"model.{setting}" for setting in shape] + ["model.vocab_size=8192"]
    return load(base, (*settings, *COMMON, *overrides)).config


def cluster(device="h100-sxm", devices_per_node=8, **change):
    """Nodes of one kind of device, NVLink inside and InfiniBand between them."""
    links = [
        LinkLevel(name="nvlink", kind="nvlink", devices=devices_per_node, bandwidth_gb_per_s=450.0, latency_us=2.0),
        LinkLevel(name="network", kind="network", bandwidth_gb_per_s=50.0, latency_us=5.0),
    ]
    base = {"name": "test", "device": device, "devices_per_node": devices_per_node, "cores_per_node": 64, "memory_per_node_gib": 512}
    return ClusterConfig(**(base | {"links": links, "nic_gb_per_s": 400.0} | change))
