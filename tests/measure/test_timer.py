"""The device timer: the pauses before rounds."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ridgeline.configs.cluster import LinkLevel
from ridgeline.measure import calibration, timer


def test_a_pause_comes_before_each_round_and_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def work() -> object:
        order.append("work")
        return jnp.zeros(())

    monkeypatch.setattr(timer.time, "sleep", lambda seconds: order.append(f"rest {seconds}"))
    found = timer.rounds_s(work, rounds=3, least_s=0.0, most=1, rest_s=0.3)
    assert order == ["work", *(["rest 0.3", "work"] * 3)]
    assert len(found) == 3


def test_matmuls_of_a_gpu_are_measured_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(timer.time, "sleep", lambda seconds: rests.append(seconds) if seconds else None)
    sizes = calibration.Sizes(((8, 8, 8), (16, 8, 8)), ("float32",), 2**12, (2**10,), (), rest_s=calibration.GPU.rest_s)
    level = LinkLevel(name="memory", kind="memory", bandwidth_gb_per_s=10.0, latency_us=0.0)
    calibration.calibrate("cpu", sizes, level, report=lambda line: None)
    assert rests == [calibration.GPU.rest_s] * (2 * timer.ROUNDS)
    assert calibration.GPU.rest_s > 0
