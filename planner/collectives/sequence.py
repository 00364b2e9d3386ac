"""The collectives of attention over a sequence that context shards (models/attention/ring.py, dispatch.py)."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.context import context_method
from ridgeline.planner.collectives.planned import Phase, PlannedCollective, StepSizes
from ridgeline.planner.recompute import Recomputed


def sequence(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of attention over a sharded sequence (models/attention/ring.py, dispatch.py)."""
    method = context_method(step.config, step.sizes)
    if method is None:
        return []
    if method == "all_to_all":
        return [*_exchanges(step, "forward", 4), *_exchanges(step, "backward", 4)]
    keys = 2 * _keys(step)
    home = replace(_hops(step, "gradients of keys and values", "backward", keys), count=step.layers)
    return [
        _hops(step, "keys and values", "forward", keys),
        _hops(step, "keys and values", "backward", keys),
        _hops(step, "sums of gradients of keys and values", "backward", keys // step.act * 4),
        home,
    ]


def sequence_recomputed(step: StepSizes, again: Recomputed) -> list[PlannedCollective]:
    """Return what the backward pass of a block repeats of `_sequence`."""
    method = context_method(step.config, step.sizes)
    if method is None:
        return []
    if method == "ring":
        if not step.gpu and step.context == 2:  # XLA's CPU backend unrolls a loop of one hop, and does not repeat it
            return []
        return [_hops(step, "keys and values (recomputed)", "backward", 2 * _keys(step))] if again.attention else []
    exchanged = {"none": 0, "attention-only": 3}.get(step.config.compute.remat.policy, 4)
    return _exchanges(step, "backward", exchanged, " (recomputed)")


def _keys(step: StepSizes) -> int:
    """Bytes of the keys of a device, or of the values of a ring, where they have the width of keys."""
    return step.tokens * step.model.kv_heads * step.model.head_width * step.act // step.tensor


def _hops(step: StepSizes, what: str, phase: Phase, size: int) -> PlannedCollective:
    item = step.item(what, phase, "collective-permute", step.over("context"), size)
    return replace(item, count=step.layers * (step.context - 1), by_hand=True)


def _exchanges(step: StepSizes, phase: Phase, number: int, note: str = "") -> list[PlannedCollective]:
    """Return the first `number` all-to-alls of queries, keys, values and attention result."""
    model = step.model
    query = _keys(step) * model.num_heads // model.kv_heads
    values, result = (size * model.value_width // model.head_width for size in (_keys(step), query))
    arrays = (("queries", query), ("keys", _keys(step)), ("values", values), ("attention result", result))
    return [
        replace(step.item(what + note, phase, "all-to-all", step.over("context"), size), by_hand=True) for what, size in arrays[:number]
    ]
