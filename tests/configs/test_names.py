"""The names a config may use are exactly those that models and trainer implement."""

from __future__ import annotations

from ridgeline.configs import names
from ridgeline.configs.compose import family_names
from ridgeline.models import attention, registry, remat
from ridgeline.trainer import optimizers, schedules


def test_configs_know_exactly_what_is_implemented() -> None:
    assert set(names.ATTENTION_BACKENDS) == {"auto", *attention.backend_names()}
    assert set(names.REMAT_POLICIES) == set(remat.POLICIES)
    assert tuple(remat.NAMES) == names.REMAT_NAMES
    assert set(names.OPTIMIZERS) == set(optimizers.OPTIMIZERS)
    assert set(names.SCHEDULES) == set(schedules.SCHEDULES)
    assert family_names() == sorted(registry.FAMILIES)
