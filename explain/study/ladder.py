"""Build the document of a scaling-law ladder: measured losses, the fitted law, its check, the target and the model for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count
from ridgeline.explain.study.document import FORMAT, LadderStudy
from ridgeline.explain.study.ladder_document import LadderCheck, LadderModel, LadderRow, PlannedCost, PredictedLoss
from ridgeline.explain.study.loss_law import ASSUMED_NOISE, LossLaw, Point, fit_loss_law
from ridgeline.rundir.noise import spread

FAR = 100.0
"""Compute of the target over that of the largest run from which on the extrapolation is called far."""


@dataclass(frozen=True)
class MeasuredSize:
    """The finished runs of one size."""

    name: str
    embed_dim: int
    num_layers: int
    params: int
    tokens: float
    steps: int
    flops: float
    runs: Sequence[str]
    losses: Sequence[float]
    """Of each run, nats per token."""
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class Planned:
    """A model that was not trained."""

    name: str
    embed_dim: int
    num_layers: int
    params: int
    tokens: float
    flops: float
    cost: PlannedCost | None


@dataclass(frozen=True)
class LadderQuestion:
    """What a ladder answers."""

    tokens_per_parameter: float
    loss_of: str
    target: Planned
    recommendation: Planned
    budget_flops: float
    where: str
    doubts: Sequence[str] = ()
    """Known before the fit."""


def ladder_study(name: str, sizes: Sequence[MeasuredSize], question: LadderQuestion) -> LadderStudy:
    """Return the document of a ladder, smallest compute first. Raises UserError when fewer than two sizes have a finished run."""
    ran = [size for size in sizes if size.losses]
    if len(ran) < 2:
        reasons = "; ".join(f"{size.name}: {reason}" for size in sizes for reason in dict.fromkeys(size.failures))
        raise UserError(f"{len(ran)} of {len(sizes)} sizes are finished, and a law needs 2: {reasons or 'nothing was started'}")
    law = fit_loss_law(_points(ran))
    check = _check(ran)
    rows = [_row(size, law) for size in sizes]
    found: LadderStudy = {
        "format": FORMAT,
        "kind": "ladder",
        "name": name,
        "objective": "loss",
        "tokens_per_parameter": question.tokens_per_parameter,
        "loss_of": question.loss_of,
        "where": question.where,
        "rows": rows,
        "law": {
            "irreducible": law.irreducible,
            "amplitude": law.amplitude,
            "alpha": law.alpha,
            "flops_scale": law.flops_scale,
            "noise": law.noise,
            "noise_measured": law.noise_measured,
            "irreducible_fitted": law.irreducible_fitted,
            "worst_error": law.worst_error,
            "intervals": law.intervals,
        },
        "check": check,
        "target": _predicted_model(law, question.target),
        "recommendation": _predicted_model(law, question.recommendation),
        "budget_flops": question.budget_flops,
        "doubts": [*question.doubts, *_doubts(law, ran, check, question)],
        "verdict": [],
    }
    found["verdict"] = _verdict(found)
    return found


def _points(sizes: Sequence[MeasuredSize]) -> list[Point]:
    return [Point(size.flops, loss) for size in sizes for loss in size.losses]


def _predict(law: LossLaw, flops: float) -> PredictedLoss:
    low, high = law.interval(flops)
    return {"flops": flops, "loss": law.loss(flops), "low": low, "high": high}


def _check(ran: Sequence[MeasuredSize]) -> LadderCheck | None:
    """Predict the largest size from the smaller ones."""
    *smaller, largest = ran
    if len(smaller) < 2:
        return None
    predicted, measured = _predict(fit_loss_law(_points(smaller)), largest.flops), _mean(largest.losses)
    error, inside = predicted["loss"] / measured - 1, predicted["low"] <= measured <= predicted["high"]
    return {**predicted, "size": largest.name, "measured": measured, "error": error, "inside": inside}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(size: MeasuredSize, law: LossLaw) -> LadderRow:
    row: LadderRow = {
        "size": size.name,
        "embed_dim": size.embed_dim,
        "num_layers": size.num_layers,
        "params": size.params,
        "tokens": size.tokens,
        "steps": size.steps,
        "flops": size.flops,
        "runs": list(size.runs),
        "repeats": len(size.losses),
        "failures": list(size.failures),
        "failure": None if size.losses else "; ".join(dict.fromkeys(size.failures)) or "did not run",
        "losses": list(size.losses),
    }
    if size.losses:
        row |= {"loss": _mean(size.losses), "spread": spread(size.losses), "fitted": law.loss(size.flops)}
    return row


def _predicted_model(law: LossLaw, model: Planned) -> LadderModel:
    return {
        **_predict(law, model.flops),
        "name": model.name,
        "embed_dim": model.embed_dim,
        "num_layers": model.num_layers,
        "params": model.params,
        "tokens": model.tokens,
        "cost": model.cost,
    }


def _doubts(law: LossLaw, ran: Sequence[MeasuredSize], check: LadderCheck | None, question: LadderQuestion) -> list[str]:
    found = []
    if not law.irreducible_fitted:
        found.append("two sizes cannot show the irreducible loss: a power law without it was fitted, whose predictions are too low")
    elif len(ran) == 3:
        found.append("three sizes determine the law without any size to spare: add one or two")
    if not law.noise_measured:
        found.append(f"there are no more runs than coefficients: a scatter of {ASSUMED_NOISE:.0%} was assumed (--repeats 2, or more sizes)")
    if check is not None and len(ran) == 3:
        found.append("the check of three sizes is of a power law through two, without an irreducible loss: it is too low")
    elif check is not None and not check["inside"]:
        found.append(
            f"the largest size is outside of the interval that the smaller ones predict ({check['error']:+.1%}): do not extrapolate"
        )
    means = [_mean(size.losses) for size in ran]
    if any(later >= earlier for earlier, later in pairwise(means)):
        found.append("a larger size has no lower loss than a smaller one: the learning rate may not fit it, or the noise is too large")
    if (far := question.target.flops / ran[-1].flops) > FAR:
        found.append(
            f"the target takes {far:,.0f} times the compute of the largest run: the interval does not know what changes on the way"
        )
    return found


def _verdict(ladder: LadderStudy) -> list[str]:
    law, target, chosen = ladder["law"], ladder["target"], ladder["recommendation"]
    shown = law["intervals"]

    def with_interval(key: str, value: float) -> str:
        return f"{value:.3g} ({shown[key][0]:.3g} to {shown[key][1]:.3g})"

    lines = [
        f"{target['name']} ({_described(target)}) should reach a loss of {_loss(target)}{_cost(target['cost'])}",
        f"for {ladder['budget_flops']:.2e} FLOP at {ladder['tokens_per_parameter']:g} tokens per parameter: {chosen['name']} "
        f"({_described(chosen)}), loss {_loss(chosen)}{_cost(chosen['cost'])}",
        f"loss = {with_interval('irreducible', law['irreducible'])} + {with_interval('amplitude', law['amplitude'])} x "
        f"(FLOP / {law['flops_scale']:.2e})^-{with_interval('alpha', law['alpha'])}, worst error {law['worst_error']:.1%}; "
        f"in parentheses 90% intervals",
    ]
    if (check := ladder["check"]) is not None:
        place = "inside" if check["inside"] else "outside"
        lines.append(
            f"check: {check['size']} was predicted from the smaller sizes as {_loss(check)} and measured as {check['measured']:.4f} "
            f"({check['error']:+.1%}, {place} of the interval)"
        )
    failed = [f"{row['size']} has no result: {row['failure']}" for row in ladder["rows"] if row["failure"] is not None]
    return [*lines, *failed, *ladder["doubts"]]


def _loss(predicted: PredictedLoss) -> str:
    return f"{predicted['loss']:.4f} ({predicted['low']:.4f} to {predicted['high']:.4f})"


def _described(model: LadderModel) -> str:
    return f"{format_count(model['params'])} parameters, {format_count(model['tokens'])} tokens, {model['flops']:.2e} FLOP"


def _cost(cost: PlannedCost | None) -> str:
    if cost is None:
        return ""
    if "why_none" in cost:
        return f"; no plan on {cost['cluster']}: {cost['why_none']}"
    usd = "" if cost["wall_usd"] is None else f", {cost['wall_usd']:,.0f} USD"
    return f"; planned on {cost['cluster']}: {cost['wall_days']:.3g} days on {cost['devices']} devices{usd}"
