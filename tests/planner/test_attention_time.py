"""Time of attention: the blocks that are computed, their memory traffic as compiled, and the shares of fused kernels."""

from __future__ import annotations

import pytest

from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.attention_time import KERNEL_MATMULS, attention_times, block_pairs, counted_flops, fused_flops_per_s
from ridgeline.planner.flops import mean_keys_per_layer
from ridgeline.planner.hardware import hardware
from ridgeline.planner.local import LocalSizes
from tests.planner.clusters import CALIBRATION


def sizes(model, *overrides, **mesh):
    made = load(f"models/{model}", ["precision.compute=bfloat16", "data.document_masking=false", *overrides])
    return LocalSizes.of(made.config, dict.fromkeys(MESH_AXES, 1) | mesh)


@pytest.mark.parametrize(("model", "seq_len", "block"), [("llama-3.1-8b", 1000, 128), ("gemma2-9b", 16384, 512), ("gemma3-4b", 4096, 128)])
def test_pairs_of_blocks_are_those_with_a_key_that_a_query_sees(model, seq_len, block):
    chosen = load(f"models/{model}", [f"data.seq_len={seq_len}", "model.max_seq_len=16384"]).config.model

    def pairs(window):
        blocks = range(-(-seq_len // block))
        return sum(j <= i and (window is None or (i - j - 1) * block + 1 < window) for i in blocks for j in blocks)

    layers = [pairs(chosen.local_span if chosen.windowed(layer) else None) for layer in range(chosen.num_layers)]
    assert block_pairs(chosen, seq_len, block) == pytest.approx(sum(layers) / len(layers))


def test_attention_in_blocks_moves_what_its_compiled_kernels_do():
    """MB per pair of blocks of a compiled step of Gemma 2 2B for an H200 with 8 rows (jaxlib 0.10.2), and 8.4 MB of a sum that is read."""
    local = sizes("gemma2-2b", "data.seq_len=32768", "model.max_seq_len=32768", "data.batch_size=8", "trainer.accumulation=1")
    device = hardware("h200-sxm")
    times, pairs = attention_times(local, device, CALIBRATION, "bfloat16"), block_pairs(local.model, 32768, 128)
    assert times.forward.compute_s == times.backward.compute_s == 0, "scores of 128 keys take longer to move than to multiply"
    for work, moved in ((times.forward, 68.0), (times.backward, 109.5 + 8.4)):
        assert work.memory_s * CALIBRATION.memory_bytes_per_s(device) / pairs / 1e6 == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize("backend", ["cudnn", "pallas"])
def test_the_kernels_of_fused_attention_together_take_its_time(backend):
    """Forward 2 matmuls of the size of the scores; backward 5, or 3 and 4 in the two kernels of Pallas."""
    local, device = sizes("llama-3.1-8b", f"compute.attention.backend={backend}", "data.seq_len=4096"), hardware("h100-sxm")
    times = attention_times(local, device, CALIBRATION, "bfloat16")
    rate = fused_flops_per_s(device, CALIBRATION, "bfloat16", 4096, 128, backend)
    one = 2 * mean_keys_per_layer(local.model, 4096) * 128 * 32 * local.tokens
    backward = [5] if backend == "cudnn" else [3, 4]
    assert sum(backward) == KERNEL_MATMULS[backend]
    assert counted_flops(2 * one, backend, backward=False) / rate == pytest.approx(times.forward.seconds)
    assert sum(counted_flops(n * one, backend, backward=True) for n in backward) / rate == pytest.approx(times.backward.seconds)
