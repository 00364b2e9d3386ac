"""What other programs took of the cores, from the kernel's counters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ridgeline.measure.cpu_load import OtherCpuLoad

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two cores and their counters."""

    def __init__(self, directory: Path) -> None:
        self.stat, self.now_s, self.own_s = directory / "stat", 0.0, 0.0
        self.busy_s, self.idle_s, self.stolen_s = [0.0] * 4, [0.0] * 4, [0.0] * 4
        self.write()

    def write(self) -> None:
        rows = [
            f"cpu{i} {round(b * TICKS)} 0 0 {round(d * TICKS)} 0 0 0 {round(s * TICKS)} 0 0"
            for i, (b, d, s) in enumerate(zip(self.busy_s, self.idle_s, self.stolen_s, strict=True))
        ]
        self.stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "intr 5", ""]))

    def watch(self) -> OtherCpuLoad:
        return OtherCpuLoad(self.stat, {0, 1}, lambda: self.own_s, lambda: self.now_s)


def test_what_others_took_is_busy_time_that_is_not_ours(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    watch = machine.watch()
    machine.now_s, machine.own_s = 10.0, 8.0
    machine.busy_s, machine.idle_s, machine.stolen_s = [9.0, 3.0, 10.0, 10.0], [1.0, 5.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]
    machine.write()
    assert watch.share() == pytest.approx((9 + 3 + 2 - 8) / 20)  # the cores that are not ours do not count, what a hypervisor took does


def test_alone_is_none_of_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    watch = machine.watch()
    machine.now_s, machine.own_s, machine.busy_s = 10.0, 20.1, [10.0, 10.0, 0.0, 0.0]
    machine.write()
    assert watch.share() == 0.0


def test_a_kernel_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert OtherCpuLoad(tmp_path / "nowhere").share() is None


def test_the_real_counters_are_read() -> None:
    watch = OtherCpuLoad()
    sum(i * i for i in range(2_000_000))
    share = watch.share()
    assert share is not None
    assert 0 <= share <= 1
