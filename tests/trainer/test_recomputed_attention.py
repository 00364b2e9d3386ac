"""Compiled GPU steps compute the attention of a recomputed layer once in the backward pass."""

from __future__ import annotations

from functools import cache

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.hlo.category import category
from ridgeline.hlo.module import PASSES, part_of
from ridgeline.hlo.parse import parse
from ridgeline.trainer.aot.compile import Compiled, Request, compile_many
from tests.sampling import drawn
from tests.trainer.gpu_models import QUICK, cluster, small

pytestmark = pytest.mark.xdist_group("aot")
LAYERS = 8
FULL = "compute.remat.policy=full"
GATHER = ("mesh.expert=4", "compute.experts.exchange=gather")
CASES = {
    "tensor": ("llama", "mesh.fsdp=4", "mesh.tensor=2", FULL),
    "tensor, no fsdp": ("llama", "mesh.data=2", "mesh.tensor=4", FULL),
    "tensor, MLP kept": ("llama", "mesh.fsdp=4", "mesh.tensor=2", "compute.remat.policy=names", "compute.remat.names=[mlp_gate,mlp_up]"),
    "tensor, inputs in host memory": (
        *("llama", "mesh.fsdp=4", "mesh.tensor=2"),
        *("compute.remat.policy=offload", "compute.remat.names=[block_input]"),
    ),
    "tensor, microbatches": ("qwen3", "mesh.fsdp=4", "mesh.tensor=2", "trainer.accumulation=2", FULL),
    "tensor, windows in turns": (
        *("llama", "mesh.fsdp=4", "mesh.tensor=2", "model.sliding_window=256", "model.full_attention_every=2", FULL),
    ),
    "tensor, learned positions": ("gpt2", "mesh.fsdp=4", "mesh.tensor=2", FULL),
    "context and tensor": ("llama", "mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "compute.attention.context=all_to_all", FULL),
    "context": ("llama", "mesh.fsdp=2", "mesh.context=4", "compute.attention.context=all_to_all", FULL),
    "tokens of experts": ("experts", "mesh.fsdp=2", *GATHER, FULL),
    "tokens of experts, packed": ("experts", "mesh.fsdp=2", "data.document_masking=true", *GATHER, FULL),
    "experts and tensor": ("experts", "mesh.fsdp=2", "mesh.tensor=2", "mesh.expert=2", FULL),
}
"""Family and settings of layouts in which attention's update is recomputed and then gathered, and of one in which it is not gathered."""
SAMPLE = drawn(tuple(CASES), 2)


@cache
def compiled() -> dict[str, Compiled | UserError]:
    """The layouts of the sample, compiled in one process."""
    requests = []
    for family, *settings in (CASES[name] for name in SAMPLE):
        config = small(family, "compute.attention.backend=auto", "data.document_masking=false", *settings, f"model.num_layers={LAYERS}")
        requests.append(Request.on(config, cluster(), 1, xla_flags=QUICK, optimization_level="O1"))
    return dict(zip(SAMPLE, compile_many(requests), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_attention_is_computed_once_in_the_backward_pass(name: str) -> None:
    result = compiled()[name]
    assert isinstance(result, Compiled), result
    module, found = parse(result.hlo_text), dict.fromkeys(PASSES, 0.0)
    for computation, instruction in module.instructions():
        if instruction.opcode == "custom-call" and category(module, instruction) == "attention":
            found[part_of(instruction.op_name)] += module.runs[computation.name]
    batches = 2 if "microbatches" in name else 1
    assert found["forward"] == found["recompute"] == LAYERS * batches
