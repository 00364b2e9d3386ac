"""The device timer: the pauses before rounds."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ridgeline.measure import timer


def test_a_pause_comes_before_each_round_and_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def work() -> object:
        order.append("work")
        return jnp.zeros(())

    monkeypatch.setattr(timer.time, "sleep", lambda seconds: order.append(f"rest {seconds}"))
    found = timer.rounds_s(work, rounds=3, least_s=0.0, most=1, rest_s=0.3)
    assert order == ["work", *(["rest 0.3", "work"] * 3)]
    assert len(found) == 3
