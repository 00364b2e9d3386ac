"""Parts of the document of a scaling-law ladder (explain/study/document.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired  # pydantic needs this TypedDict before Python 3.12

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


@with_config(ConfigDict(extra="allow", strict=True))
class LadderRow(TypedDict):
    """One size of a ladder."""

    size: str
    """Width x layers, such as 256x8."""
    embed_dim: int
    num_layers: int
    params: int
    """Parameters that process a token."""
    tokens: float
    steps: int
    flops: float
    """Of the whole run."""
    runs: list[str]
    """Run directories of the finished seeds."""
    repeats: int
    failures: list[str]
    failure: str | None
    """Why no seed finished; None when one did."""
    losses: list[float]
    """Of each seed, nats per token."""
    loss: NotRequired[float]
    """Mean of the seeds."""
    spread: NotRequired[float]
    """Half the range of the seeds over their mean."""
    fitted: NotRequired[float]
    """Loss by the law."""


class FittedLossLaw(TypedDict):
    """The law of explain/study/loss_law.py: irreducible + amplitude * (flops / flops_scale)^-alpha."""

    irreducible: float
    amplitude: float
    alpha: float
    flops_scale: float
    noise: float
    noise_measured: bool
    irreducible_fitted: bool
    worst_error: float
    intervals: Mapping[str, tuple[float, float]]
    """90 % intervals of irreducible, amplitude and alpha."""


class PredictedLoss(TypedDict):
    """The loss of a run by the law, with its 90 % interval."""

    flops: float
    loss: float
    low: float
    high: float


class LadderCheck(PredictedLoss):
    """The largest size, predicted from the smaller ones."""

    size: str
    measured: float
    error: float
    """Predicted over measured, less 1."""
    inside: bool
    """Whether the measured loss is in the interval."""


class PlannedCost(TypedDict, total=False):
    """What a run takes on a cluster, by the planner."""

    cluster: str
    nodes: int
    devices: int
    days: float
    wall_days: float
    """With failures, saves and restarts."""
    device_hours: float
    usd: float | None
    wall_usd: float | None
    mfu: float
    layout: str
    why_none: str
    """Why there is no plan."""


class LadderModel(PredictedLoss):
    """A model that was not trained: the target, or the one of a budget."""

    name: str
    embed_dim: int
    num_layers: int
    params: int
    tokens: float
    cost: PlannedCost | None
    """None: no cluster was given."""
