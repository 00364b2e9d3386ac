"""Flags of sharded meshes, from the size of a layer: numbers by hand."""

import pytest

from ridgeline.configs.load import load
from ridgeline.launch.overlap_flags import overlap_flags

LAYER_8B = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336 + 2 * 4096 + 4096 // 32
"""Attention, MLP, norms, and a layer's share of the final norm."""
LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit"


def flags(*overrides: str) -> dict[str, str]:
    base = ("precision.compute=bfloat16", "mesh.fsdp=1", "data.batch_size=64")
    return {name: value for name, value, _ in overlap_flags(load("models/llama-3.1-8b", [*base, *overrides]).config)}


@pytest.mark.parametrize(("mesh", "pieces"), [(("mesh.fsdp=64",), 1), (("mesh.fsdp=-1",), 1), (("mesh.fsdp=16", "mesh.tensor=4"), 4)])
def test_what_is_combined_is_one_layer_in_the_dtype_that_moves(mesh: tuple[str, ...], pieces: int) -> None:
    found = flags(*mesh)
    assert int(found["--xla_gpu_all_gather_combine_threshold_bytes"]) == LAYER_8B * 2 // pieces
    assert int(found["--xla_gpu_reduce_scatter_combine_threshold_bytes"]) == LAYER_8B * 4 // pieces
    narrow = flags(*mesh, "precision.gradients=bfloat16")
    assert int(narrow["--xla_gpu_reduce_scatter_combine_threshold_bytes"]) == LAYER_8B * 2 // pieces


@pytest.mark.parametrize(
    ("mesh", "limit"),
    [
        (("mesh.fsdp=64",), "3"),
        (("mesh.fsdp=32", "mesh.tensor=2"), "3"),
        (("mesh.fsdp=8", "mesh.tensor=8"), "2"),
        (("mesh.tensor=8",), "2"),
        (("mesh.fsdp=32", "mesh.tensor=2", "compute.tensor_overlap=ring"), "2"),
        (("mesh.fsdp=64", "compute.tensor_overlap=ring"), "3"),
    ],
)
def test_a_wide_tensor_axis_leaves_room_for_fewer_collectives_at_once(mesh: tuple[str, ...], limit: str) -> None:
    assert flags(*mesh)[LIMIT] == limit


def test_data_parallelism_alone_changes_nothing() -> None:
    assert flags("mesh.data=8") == {}
