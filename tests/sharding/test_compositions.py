"""Compositions of the mesh axes, drawn from all legal ones: each trains as one device does and moves the planned bytes.

`make compositions` runs all of them on 8 devices and a sample on 16 and 32; the suite runs a seeded sample on 8.
"""

import itertools
import os
import random
import re
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest

from ridgeline.configs.model_schema import MoEConfig
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, Config, ExpertsConfig, RematConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.trainer.prepare import prepare
from ridgeline.trainer.step import abstract_batch
from tests.sampling import drawn
from tests.sharding.test_collective_budget import array_bytes, budget
from tests.sharding.test_equality import BATCH, SEQ, compare, make_config, packed_reference, trained

DEVICES = int(re.search(r"device_count=(\d+)", os.environ["XLA_FLAGS"])[1])
COUNT, SEED = os.environ.get("COMPOSITIONS", "2"), int(os.environ.get("SEED", "0"))
"""Compositions to run (`all`, or a number), and the seed of their options."""
AXES = ("pipeline", "data", "fsdp", "context", "tensor", "expert")
EXPERTS = {"moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=32)}
STEPS = 2
ROUTER_BYTES = 2048
"""Of a microbatch: sums over tokens that the router's metrics and losses need, a few numbers per expert and layer."""


@dataclass(frozen=True)
class Composition:
    """A layout with what else changes its collectives."""

    sizes: tuple[int, ...]
    method: str
    """Of attention over context."""
    experts: bool
    exchange: str
    zero_stage: int
    accumulation: int
    remat: str
    packed: bool
    chunks: int
    """Of layers in a pipeline stage."""

    @property
    def name(self) -> str:
        """For the test's id."""
        axes = [f"{axis}{size}" for axis, size in self.mesh.items() if size > 1]
        options = {
            self.method: self.mesh["context"] > 1,
            "experts": self.experts,
            f"{self.exchange}-exchange": self.mesh["expert"] > 1,
            "zero": self.zero_stage,
            "microbatches": self.accumulation > 1,
            "unpacked": not self.packed,
            "interleaved": self.chunks > 1,
        }
        return "-".join([*axes, *(name for name, on in options.items() if on), self.remat])

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> devices."""
        return dict(zip(AXES, self.sizes, strict=True))

    @property
    def config(self) -> Config:
        """A small model on this layout."""
        config = make_config(1, 1, 1, self.accumulation, zero=self.zero_stage, **self.model)
        mesh = config.mesh.model_copy(update=self.mesh | {"pipeline_chunks": self.chunks})
        compute = ComputeConfig(
            attention=AttentionConfig(backend="chunked", chunk=2, context=self.method),
            loss_chunk=BATCH * SEQ,
            remat=RematConfig(policy=self.remat),
            experts=ExpertsConfig(exchange=self.exchange),
        )
        data = config.data.model_copy(update={"document_masking": self.packed})
        return config.model_copy(update={"mesh": mesh, "compute": compute, "data": data})

    @property
    def model(self) -> dict:
        """The settings of its model. Stages of one or two layers have no loop over them: XLA's CPU backend moves their gathers out of the
        loop of ticks (its GPU backend does not: tests/planner/test_collectives_gpu.py)."""
        layers = {"num_layers": 3 * self.mesh["pipeline"] * self.chunks}
        heads = {} if self.experts else {"num_kv_heads": 4 if self.mesh["context"] * self.mesh["tensor"] <= 4 else 8}
        return layers | heads | (EXPERTS if self.experts else {})


@cache
def compositions() -> list[Composition]:
    """Every factorization of the devices over the axes, with every way of sharding the sequence and the state, and drawn other options."""
    rng, found = random.Random(SEED), []
    powers = [2**n for n in range(DEVICES.bit_length())]
    for sizes in itertools.product(powers, repeat=len(AXES)):
        if np.prod(sizes) != DEVICES:
            continue
        pipeline, data, _, context, _, expert = sizes
        for method, zero in itertools.product(("ring", "all_to_all") if context > 1 else ("auto",), (0, 2) if data > 1 else (0,)):
            options = (
                expert > 1 or rng.random() < 0.3,
                rng.choice(("gather", "all_to_all")),
                zero,
                rng.choice((1, 1, 2)) if pipeline == 1 else rng.choice((pipeline, 2 * pipeline)),
                rng.choice(("none", "full", "dots")),
                rng.random() < 0.7,
                rng.choice((1, 1, 2)) if pipeline > 1 else 1,
            )
            one = Composition(sizes, method, *options)
            if not check_config(one.config):
                found.append(one)
    return found


def sample() -> list[Composition]:
    """The compositions to run."""
    every = compositions()
    return every if COUNT == "all" else drawn(every, int(COUNT))


def test_there_are_forty_of_eight_devices():
    assert DEVICES != 8 or len(compositions()) >= 40


@pytest.mark.parametrize("axis", drawn(AXES, 3))
def test_the_remaining_devices_are_given_to_any_axis(axis):
    """-1 lowers to the program of the size that it stands for."""
    [one] = drawn([one for one in compositions() if one.mesh[axis] == 2], 1)

    def program(size: int) -> str:
        config = one.config.model_copy(update={"mesh": one.config.mesh.model_copy(update={axis: size})})
        assert not check_config(config)
        parts = prepare(config)
        assert dict(parts.mesh.shape) == one.mesh
        return str(parts.train_step.lower(parts.abstract, abstract_batch(config, parts.partitioner)).as_text())

    assert program(-1) == program(2)


@pytest.mark.parametrize("one", sample(), ids=lambda one: one.name)
def test_a_composition_trains_as_one_device_and_moves_what_is_planned(one):
    config = one.config
    *found, compiled = trained(config, jax.devices(), STEPS)
    losses, gradients = packed_reference(one.packed, **one.model)
    compare(found, (losses[: 2 * STEPS], gradients))
    sizes = dict(config.mesh.sizes)
    moved = budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in collectives(parse(compiled.as_text()), sizes) if array_bytes(c))
    items = compiled_collectives(config, sizes, gpu=False)
    planned = budget(((item.kind, item.axes), item.bytes * item.count) for item in items)
    # In a stage XLA's CPU backend may gather the gradient of an update once where its GPU backend gathers it twice.
    second = [item.bytes * item.count for item in items if item.what.endswith("update (again)") and item.axes == ("tensor",)]
    merged = {sum(some) for n in range(len(second) + 1) for some in itertools.combinations(second, n)}
    statistics = ROUTER_BYTES * config.trainer.accumulation if one.experts else 0
    for key in moved.keys() | planned.keys():
        less = merged if key == ("all-gather", ("tensor",)) else {0}
        off = min(abs(planned.get(key, 0) - fewer - moved.get(key, 0)) for fewer in less)
        assert off <= (statistics if key[0] == "all-reduce" else 0), (key, moved, planned)
