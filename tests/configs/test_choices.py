"""The names a config may use are exactly those that models and trainer implement."""

from __future__ import annotations

from ridgeline.configs import choices
from ridgeline.configs.compose import family_names
from ridgeline.models import attention, family
from ridgeline.trainer import optimizers, schedules


def test_configs_know_exactly_what_is_implemented() -> None:
    assert set(choices.ATTENTION_BACKENDS) == {"auto", *attention.backend_names()}
    assert set(choices.OPTIMIZERS) == set(optimizers.OPTIMIZERS)
    assert set(choices.SCHEDULES) == set(schedules.SCHEDULES)
    assert family_names() == sorted(family.families())
