"""Whether to pass parts round a ring is read off both compiled schedules, where both fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.trainer.aot.report import compare_overlap, other_overlap


def report(step_s: float, *, fits: bool = True) -> Any:
    """What is read of a report."""
    schedule = SimpleNamespace(step_s=step_s, exposed_s=step_s / 10)
    return SimpleNamespace(schedule=schedule, overlapped_share=0.9, needed_bytes=10, fits=fits)


@pytest.mark.parametrize(
    ("gather_s", "ring_s", "faster", "ratio", "advice"),
    [
        (10.0, 8.0, "ring", 1.25, ("compute.tensor_overlap=ring", "1.25 times")),
        (8.0, 10.0, "gather", 1.25, ("keep gather", "1.25 times")),
        (10.0, 10.1, None, 1.01, ("2%", "keep gather")),
    ],
)
def test_the_shorter_simulated_step_is_advised_unless_they_are_equal(
    gather_s: float, ring_s: float, faster: str | None, ratio: float, advice: tuple[str, ...]
) -> None:
    found = compare_overlap({"gather": report(gather_s), "ring": report(ring_s)})
    assert found["faster"] == faster and all(part in found["advice"] for part in advice)
    assert found["ratio"] == pytest.approx(ratio)
    assert [(row["value"], row["needed_bytes"]) for row in found["rows"]] == [("gather", 10), ("ring", 10)], "the config's own first"


def test_what_does_not_fit_is_not_advised_however_fast() -> None:
    found = compare_overlap({"ring": report(1.0, fits=False), "gather": report(9.0)})
    assert (found["faster"], found["ratio"]) == ("gather", None) and "compute.tensor_overlap=gather" in found["advice"]
    none = compare_overlap({"ring": report(1.0, fits=False), "gather": report(9.0, fits=False)})
    assert none["faster"] is None and none["advice"]


def test_the_other_way_needs_a_tensor_axis() -> None:
    cut = load("models/llama-3.2-1b", ("mesh.fsdp=-1", "mesh.tensor=2")).config
    assert other_overlap(cut, 8) == "ring"
    ringed = load("models/llama-3.2-1b", ("mesh.fsdp=-1", "mesh.tensor=2", "compute.tensor_overlap=ring")).config
    assert other_overlap(ringed, 8) == "gather"
    with pytest.raises(UserError, match=r"mesh\.tensor is 1"):
        other_overlap(load("models/llama-3.2-1b", ("mesh.fsdp=8",)).config, 8)
