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

from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, Config, MoEConfig, RematConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import compiled_collectives
from tests.sharding.test_collective_budget import array_bytes, budget
from tests.sharding.test_equality import BATCH, SEQ, compare, make_config, packed_reference, trained

DEVICES = int(re.search(r"device_count=(\d+)", os.environ["XLA_FLAGS"])[1])
COUNT, SEED = os.environ.get("COMPOSITIONS", "10"), int(os.environ.get("SEED", "0"))
"""Compositions to run (`all`, or a number), and the seed with which they are drawn."""
AXES = ("data", "fsdp", "context", "tensor", "expert")
EXPERTS = {"moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=32)}
STEPS = 2
ROUTER_BYTES = 2048
"""Of a microbatch: sums over tokens that the router's metrics and losses need, a few numbers per expert and layer."""


@dataclass(frozen=True)
class Composition:
    """A layout with what else changes its collectives."""

    sizes: tuple[int, ...]
    method: str
    experts: bool
    zero_stage: int
    accumulation: int
    remat: str
    packed: bool

    @property
    def name(self) -> str:
        """For the test's id."""
        axes = [f"{axis}{size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        options = {
            self.method: self.sizes[2] > 1,
            "experts": self.experts,
            "zero": self.zero_stage,
            "microbatches": self.accumulation > 1,
            "unpacked": not self.packed,
        }
        return "-".join([*axes, *(name for name, on in options.items() if on), self.remat])

    @property
    def config(self) -> Config:
        """A small model on this layout."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        config = make_config(sizes["data"], sizes["fsdp"], sizes["tensor"], self.accumulation, zero=self.zero_stage, **self.model)
        mesh = config.mesh.model_copy(update={"context": sizes["context"], "expert": sizes["expert"]})
        compute = ComputeConfig(
            attention=AttentionConfig(backend="chunked", chunk=2, context=self.method),
            loss_chunk=BATCH * SEQ,
            remat=RematConfig(policy=self.remat),
        )
        data = config.data.model_copy(update={"document_masking": self.packed})
        return config.model_copy(update={"mesh": mesh, "compute": compute, "data": data})

    @property
    def model(self) -> dict:
        """The settings of its model."""
        return EXPERTS if self.experts else {"num_kv_heads": 4 if self.sizes[2] * self.sizes[3] <= 4 else 8}


@cache
def compositions() -> list[Composition]:
    """Every factorization of the devices over the axes, with every way of sharding the sequence and the state, and drawn other options."""
    rng, found = random.Random(SEED), []
    powers = [2**n for n in range(DEVICES.bit_length())]
    for sizes in itertools.product(powers, repeat=len(AXES)):
        if np.prod(sizes) != DEVICES:
            continue
        data, _, context, _, expert = sizes
        for method, zero in itertools.product(("ring", "all_to_all") if context > 1 else ("auto",), (0, 2) if data > 1 else (0,)):
            drawn = (
                expert > 1 or rng.random() < 0.3,
                zero,
                rng.choice((1, 1, 2)),
                rng.choice(("none", "full", "dots")),
                rng.random() < 0.7,
            )
            one = Composition(sizes, method, *drawn)
            if not check_config(one.config):
                found.append(one)
    return found


def sample() -> list[Composition]:
    """The compositions to run."""
    every = compositions()
    return every if COUNT == "all" else random.Random(SEED + 1).sample(every, min(len(every), int(COUNT)))


def test_there_are_forty_of_eight_devices():
    assert DEVICES != 8 or len(compositions()) >= 40


@pytest.mark.parametrize("one", sample(), ids=lambda one: one.name)
def test_a_composition_trains_as_one_device_and_moves_what_is_planned(one):
    config = one.config
    *found, compiled = trained(config, jax.devices(), STEPS)
    losses, gradients = packed_reference(one.packed, **one.model)
    compare(found, (losses[: 2 * STEPS], gradients))
    sizes = dict(config.mesh.sizes)
    moved = budget(((c.kind, c.axes), array_bytes(c) * c.count) for c in collectives(parse(compiled.as_text()), sizes) if array_bytes(c))
    planned = budget(((item.kind, item.axes), item.bytes * item.count) for item in compiled_collectives(config, sizes, gpu=False))
    statistics = ROUTER_BYTES * config.trainer.accumulation if one.experts else 0
    for key in moved.keys() | planned.keys():
        assert abs(moved.get(key, 0) - planned.get(key, 0)) <= (statistics if key[0] == "all-reduce" else 0), (key, moved, planned)
