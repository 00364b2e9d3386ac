"""Detection of silent data corruption: wrong bits without an error message (docs/guides/faulty-devices.md).

Every step returns digests of its state and gradient (trainer/digests.py). They stay on the devices until a check, every
corruption_check.every steps, before each save, and before a run goes back or ends for numerical reasons, which compares

* memory: the state at the end of each step with the state that the next step has read, on each device;
* replicas: the copies of each shard, after the last step;
* replay, every corruption_check.every steps: the digests of a step that is run twice from the same state and batch, on each device.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ridgeline.rundir.bad_nodes import add_bad_nodes, node_name
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.finite import short_list
from ridgeline.trainer.digests import DIGESTS, StepDigests
from ridgeline.trainer.failures import CorruptionFound
from ridgeline.trainer.hooks import Recorder
from ridgeline.trainer.loop import Hook, StepEnd, StepResult
from ridgeline.trainer.state import TrainState
from ridgeline.trainer.step import Batch, Metrics

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Rows = dict[int, np.ndarray]
"""Row of each local device -> its digests."""
MEMORY, REPLICAS, REPLAY = "memory", "replicas", "replay"
_MEANING = {
    MEMORY: "changed in memory between two steps",
    REPLICAS: "differs from its copies on other devices",
    REPLAY: "differs between two computations of the step",
}


@dataclass(frozen=True)
class Finding:
    """A disagreement of digests."""

    step: int
    """The first step of the disagreement."""
    kind: str
    """memory, replicas or replay."""
    arrays: tuple[str, ...]
    """What disagrees: names of the state, or `gradient.NAME`."""
    devices: tuple[int, ...]
    """Positions in the mesh of the devices that may be faulty; empty where the digests do not tell."""


def judge(
    history: np.ndarray, first_step: int, continues: Sequence[bool], replay: np.ndarray | None, groups: np.ndarray, digests: StepDigests
) -> Finding | None:
    """Return the earliest disagreement of the digests of consecutive steps; None: they agree.

    Args:
      history: uint32 [steps, devices, columns], of StepDigests.
      first_step: number of the first of these steps.
      continues: of each step, whether its state is the one that the step before returned.
      replay: uint32 [devices, columns], of another computation of the last step; None: it was not replayed.
      groups: int [columns, devices]: devices with the same number have a copy of the same shard.
    """
    before, _, after = stages = digests.columns
    names = [name.removeprefix("before.") for name in digests.arrays]
    for index, now in enumerate(history):
        step, last = first_step + index, index == len(history) - 1
        if index and continues[index]:
            changed = now[:, before] != history[index - 1][:, after]
            if changed.any():
                return _finding(step, MEMORY, names[before], changed, changed.any(1))
        for stage in stages:
            differs, suspects = _outliers(now[:, stage], groups[stage])
            repeated = now[:, stage] != replay[:, stage] if replay is not None and last else np.zeros_like(differs)
            if differs.any():
                both = suspects & repeated.any(1)
                return _finding(step, REPLICAS, names[stage], differs, both if both.any() else suspects)
            if repeated.any():
                return _finding(step, REPLAY, names[stage], repeated, _alone(repeated, groups[stage]))
    return None


def _finding(step: int, kind: str, names: Sequence[str], differs: np.ndarray, devices: np.ndarray) -> Finding:
    arrays = tuple(name for column, name in enumerate(names) if differs[:, column].any())
    return Finding(step, kind, arrays, tuple(map(int, np.flatnonzero(devices))))


def _outliers(digests: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which digests [devices, columns] disagree with those of the same shard, and which devices [devices] are in the minority.

    All devices of a shard are suspects where there is no majority, unless another shard has one.
    """
    differs, minority, tied = np.zeros(digests.shape, bool), np.zeros(len(digests), bool), np.zeros(len(digests), bool)
    for column, numbers in enumerate(groups):
        for group in np.unique(numbers):
            members = np.flatnonzero(numbers == group)
            values, inverse, counts = np.unique(digests[members, column], return_inverse=True, return_counts=True)
            if len(values) == 1:
                continue
            most = counts.argmax()
            if 2 * counts[most] > len(members):
                outside = members[inverse != most]
                differs[outside, column] = minority[outside] = True
            else:
                differs[members, column] = tied[members] = True
    return differs, minority if minority.any() else tied


def _alone(repeated: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the devices whose digests differ between two computations, without their copies differing too.

    Where all copies of a shard differ, the error is older than the reduction that made them, and may be any device's.
    """
    devices = np.zeros(len(repeated), bool)
    for column in np.flatnonzero(repeated.any(0)):
        for group in np.unique(groups[column]):
            members = np.flatnonzero(groups[column] == group)
            if len(members) > 1 and repeated[members, column].all():
                return np.zeros(len(repeated), bool)
            devices[members[repeated[members, column]]] = True
    return devices


@dataclass(eq=False)
class CorruptionCheck(Hook):
    """Runs the train step, replays every `every`-th one, and compares the digests after it.

    Raises CorruptionFound in every process. Before that, process 0 records the finding, writes the nodes of the named devices to
    bad_nodes, and sets the checkpoints after the last good check aside.
    """

    every: int
    digests: StepDigests
    program: Step
    """The compiled train step, which donates its state."""
    checkpointer: Checkpointer
    recorder: Recorder
    run_dir: Path
    good_step: int
    """The last step after which all digests agreed, or the first step of this start."""
    max_bad_steps: int
    """Skipped updates in a row that end the run: a check comes before, since wrong bits are a cause of them."""
    _agreement: Agreement = field(default_factory=lambda: Agreement("corruption"), init=False)
    _step: int = field(default=0, init=False)
    _returned: TrainState | None = field(default=None, init=False)
    _history: list[tuple[int, bool, jax.Array]] = field(default_factory=list, init=False)
    """Step, whether its state is that of the step before, digests [devices, columns]: since the last check."""
    _replay: Rows | None = field(default=None, init=False)

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """Wait for the running step where the next one is replayed: its time counts as its own."""
        self._step = step + 1
        if self._step % self.every == 0:
            read_previous()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the train step; a step with a check twice, from the same bits on each device."""
        continues = state is self._returned
        if self._step % self.every == 0:
            start_s = time.monotonic()
            with self.recorder.timer.paused():
                state = self._run_once(state, batch)
            self.recorder.events.total("check", time.monotonic() - start_s, step=self._step)
        state, metrics = self.program(state, batch)
        self._history.append((self._step, continues, metrics[DIGESTS]))
        self._returned = state
        return state, {name: value for name, value in metrics.items() if name != DIGESTS}

    def _run_once(self, state: TrainState, batch: Batch) -> TrainState:
        """Run the step, keep its digests, and return the state from before it. The copy is in host memory: the devices need no more."""
        leaves, tree = jax.tree.flatten(state)
        copies = [[(shard.device, np.array(jax.device_get(shard.data))) for shard in leaf.addressable_shards] for leaf in leaves]
        places = [(leaf.shape, leaf.sharding) for leaf in leaves]
        self._replay = _rows(self.program(state, batch)[1][DIGESTS])

        def restore(shape: tuple[int, ...], sharding: jax.sharding.Sharding, shards: list[tuple[jax.Device, np.ndarray]]) -> jax.Array:
            on_devices = [jax.device_put(data, device) for device, data in shards]
            return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)

        restored = [restore(*place, shards) for place, shards in zip(places, copies, strict=True)]
        found: TrainState = jax.tree.unflatten(tree, restored)
        return jax.block_until_ready(found)

    def on_result(self, result: StepResult) -> None:
        """Compare before the run ends for numerical reasons. Raises CorruptionFound."""
        if result.metrics["bad_in_a_row"] >= self.max_bad_steps:
            self.check()

    def due(self, end: StepEnd) -> bool:
        """Return whether to check after this step: also after the last one."""
        return end.step % self.every == 0 or end.last

    def on_state(self, end: StepEnd) -> None:
        """Compare. Raises CorruptionFound."""
        self.check()

    def check(self) -> None:
        """Compare all digests since the last check, up to the step dispatched last; in every process. Raises CorruptionFound."""
        if self.good_step == self._step or not self._history:
            return
        start_s = time.monotonic()
        with self.recorder.timer.paused():
            self._check(self._step)
        self.recorder.events.total("check", time.monotonic() - start_s, step=self._step)

    def _check(self, step: int) -> None:
        kept, continues = [_rows(digests) for _, _, digests in self._history], [same for _, same, _ in self._history]
        replay, self._replay = self._replay, None
        before, _, after = self.digests.columns
        local = any(
            continues[index] and any((now[before] != kept[index - 1][row][after]).any() for row, now in rows.items())
            for index, rows in enumerate(kept)
            if index
        ) or (replay is not None and any((replay[row] != now).any() for row, now in kept[-1].items()))
        last = {row: digests[after] for row, digests in kept[-1].items()}
        per_process = self._agreement.each(lambda: [local, _text(last)])
        if not self._agreement.first(lambda: self._disagree(per_process)):
            self.good_step, self._history = step, self._history[-1:]
            return
        node = node_name()
        sent = self._agreement.each(lambda: [node, [_text(rows) for rows in kept], None if replay is None else _text(replay)])
        text = self._agreement.first(lambda: self._report(sent, continues))
        self.checkpointer.wait()
        self.checkpointer.set_later_aside(self.good_step)
        raise CorruptionFound(text)

    def _disagree(self, per_process: Sequence[Any]) -> bool:
        """In process 0: whether a process has found a difference, or the copies differ after the last step."""
        if any(local for local, _ in per_process):
            return True
        after = self.digests.columns[2]
        digests = _together([rows for _, rows in per_process], self.digests.mesh.size)
        return bool(_outliers(digests, self._groups()[after])[0].any())

    def _groups(self) -> np.ndarray:
        return np.stack(list(self.digests.groups().values()))

    def _report(self, sent: Sequence[Any], continues: Sequence[bool]) -> str:
        """In process 0: record the finding and its nodes; return it as one line."""
        size = self.digests.mesh.size
        history = np.stack([_together([rows[index] for _, rows, _ in sent], size) for index in range(len(self._history))])
        replay = None if sent[0][2] is None else _together([rows for _, _, rows in sent], size)
        found = judge(history, self._history[0][0], continues, replay, self._groups(), self.digests)
        assert found is not None
        devices = [self.digests.mesh.devices.flat[position] for position in found.devices]
        nodes = {process: node for process, (node, _, _) in enumerate(sent)}
        named = [f"device {device.id} (process {device.process_index}, node {nodes[device.process_index]})" for device in devices]
        bad = sorted({nodes[device.process_index] for device in devices})
        what = f"silent data corruption in step {found.step}: {short_list(found.arrays)} {_MEANING[found.kind]}"
        where = f" on {short_list(named)}" if named else "; the device is not known: it happened before the gradients were reduced"
        text = f"{what}{where}"
        fields = {"check": found.kind, "arrays": found.arrays, "devices": named, "nodes": bad, "good_step": self.good_step}
        self.recorder.events.emit("corruption", step=found.step, **fields)
        add_bad_nodes(self.run_dir, dict.fromkeys(bad, text), datetime.now().astimezone())
        return f"{text}; the last good check was after step {self.good_step}"


def _rows(digests: jax.Array) -> Rows:
    """Read the rows of the local devices of digests [devices, columns]."""
    return {shard.index[0].start or 0: np.asarray(jax.device_get(shard.data))[0] for shard in digests.addressable_shards}


def _text(rows: Mapping[int, np.ndarray]) -> dict[str, str]:
    """Return rows as JSON values."""
    return {str(row): base64.b64encode(digests.astype("<u4").tobytes()).decode() for row, digests in rows.items()}


def _together(parts: Sequence[Mapping[str, str]], size: int) -> np.ndarray:
    """Return the rows of all processes, uint32 [devices, columns]."""
    rows = dict(_decoded(parts))
    return np.stack([rows[row] for row in range(size)])


def _decoded(parts: Sequence[Mapping[str, str]]) -> Iterator[tuple[int, np.ndarray]]:
    for part in parts:
        for row, text in part.items():
            yield int(row), np.frombuffer(base64.b64decode(text), "<u4")
