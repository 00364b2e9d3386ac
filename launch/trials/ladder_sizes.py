"""Sizes of a ladder: models of other widths with the proportions of a config, each with its number of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.parameters import count_parameters

LEAST_STEPS = 4
LOG_LINES = 20
"""Least number of log lines of a run, so that its last training losses can be averaged."""
MOST_WIDTH = 1 << 17
_WIDTH = re.compile(r"(\d+)(?:x(\d+))?")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMB])")
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Size:
    """One size of a ladder."""

    name: str
    """Width x layers, such as 256x8."""
    config: Config
    overrides: dict[str, Any]
    """What differs from the ladder's config, dotted."""
    params: int
    """Parameters that process a token, tables included."""
    tokens: float
    flops: float
    """Of the whole run (planner/flops.py)."""


def width_unit(model: ModelConfig) -> int:
    """Return the step of the widths at which the number of heads is whole."""
    return model.embed_dim // math.gcd(model.embed_dim, model.num_heads)


def scaled(model: ModelConfig, width: int, layers: int | None = None) -> dict[str, Any]:
    """Return the keys of the model section at another width: the same head width and proportions.

    Layers, MLP and experts' widths, and heads grow in proportion to the width, rounded; key/value heads to a divisor of the heads.
    """
    ratio = width / model.embed_dim
    heads = model.num_heads * width // model.embed_dim
    wanted = max(1, round(model.kv_heads * ratio))
    changes: dict[str, Any] = {
        "embed_dim": width,
        "num_layers": layers or max(1, round(model.num_layers * ratio)),
        "num_heads": heads,
        "mlp_dim": max(1, round(model.mlp_dim * ratio)),
    }
    if model.num_kv_heads is not None:
        changes["num_kv_heads"] = max(count for count in range(1, wanted + 1) if heads % count == 0)
    if model.moe is not None and model.moe.expert_dim is not None:
        changes["moe.expert_dim"] = max(1, round(model.moe.expert_dim * ratio))
    return changes


def scaled_model(model: ModelConfig, width: int, layers: int | None = None) -> ModelConfig:
    """Return the model at another width, unchecked."""
    changes = scaled(model, width, layers)
    expert_dim = changes.pop("moe.expert_dim", None)
    if model.moe is not None and expert_dim is not None:
        changes["moe"] = model.moe.model_copy(update={"expert_dim": expert_dim})
    return model.model_copy(update=changes)


def sizes_of(config: str, overrides: Sequence[str], text: str, tokens_per_parameter: float) -> list[Size]:
    """Return the sizes of `--sizes`, smallest compute first: widths (256), widths and layers (256x8), or parameter counts (10M).

    Raises UserError naming the size for what is not one, does not divide, is given twice or is too small to train.
    """
    base = load(config, overrides).config
    if base.model.latent_attention is not None:
        raise UserError("model.latent_attention: the widths of latents do not follow the width of the model; ladders do not support them")
    found = [_size(config, overrides, base, part.strip(), tokens_per_parameter) for part in text.split(",")]
    names = [size.name for size in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--sizes {text}: {twice[0]} is given twice; use --repeats for several seeds")
    if len(found) < 2:
        raise UserError(f"--sizes {text}: a law needs at least 2 sizes, and 4 or more to be of use, such as 64,128,192,256")
    return sorted(found, key=lambda size: size.flops)


def _size(config: str, overrides: Sequence[str], base: Config, part: str, tokens_per_parameter: float) -> Size:
    if base.data.curriculum:
        raise UserError(
            "data.curriculum: its steps do not fit the sizes of a ladder, which train for different numbers of steps; remove it"
        )
    if base.init_from is not None:
        raise UserError("init_from: the sizes of a ladder start from random parameters; set it to null")
    width, layers = _dims(base.model, part)
    unit = width_unit(base.model)
    if width % unit or not width:
        near = max(unit, round(width / unit) * unit)
        raise UserError(f"--sizes {part}: must be a multiple of {unit} for whole heads as wide as those of the config ({near} works)")
    model = scaled(base.model, width, layers)
    changes: dict[str, Any] = {f"model.{key}": value for key, value in model.items()}
    params = count_parameters(scaled_model(base.model, width, layers)).active
    per_step = base.data.batch_size * base.data.seq_len
    steps = math.ceil(tokens_per_parameter * params / per_step)
    if steps < LEAST_STEPS:
        raise UserError(
            f"--sizes {part}: {params:,} parameters x {tokens_per_parameter:g} tokens are {steps} steps of {per_step:,} tokens; "
            f"at least {LEAST_STEPS} are needed: raise --tokens-per-parameter or lower data.batch_size"
        )
    changes["trainer.steps"] = steps
    changes["trainer.log_every"] = max(1, min(base.trainer.log_every, steps // LOG_LINES))
    warmup = max(min(1, base.schedule.warmup_steps), round(base.schedule.warmup_steps * steps / base.trainer.steps))
    changes["schedule.warmup_steps"] = min(steps - 1, warmup)
    try:
        made = load(config, [*overrides, *(f"{key}={value}" for key, value in changes.items())]).config
    except UserError as error:
        raise UserError(f"--sizes {part}: {error}") from None
    tokens = float(steps * per_step)
    flops = train_flops_per_token(made.model, made.data.seq_len).total * tokens
    return Size(f"{width}x{made.model.num_layers}", made, changes, params, tokens, flops)


def _dims(model: ModelConfig, part: str) -> tuple[int, int | None]:
    """Return width and, where given, layers of one size. Raises UserError."""
    if (exact := _WIDTH.fullmatch(part)) is not None:
        width, layers = int(exact[1]), None if exact[2] is None else int(exact[2])
        if 0 < width <= MOST_WIDTH and (layers is None or layers > 0):
            return width, layers
    elif (count := _COUNT.fullmatch(part)) is not None:
        wanted = float(count[1]) * _UNITS[count[2]]
        return nearest_width(model, wanted, lambda width: count_parameters(scaled_model(model, width)).active), None
    raise UserError(
        f"--sizes {part}: must be a width (256), a width and a number of layers (256x8), or a number of parameters (10M), "
        f"with widths up to {MOST_WIDTH}"
    )


def nearest_width(model: ModelConfig, wanted: float, measure: Callable[[int], float]) -> int:
    """Return the width with whole heads at which `measure` (of a width, growing with it) is nearest to `wanted`, as a ratio."""
    unit = width_unit(model)
    low, high = 1, MOST_WIDTH // unit
    while low < high:  # the first width that reaches it
        middle = (low + high) // 2
        low, high = (low, middle) if measure(middle * unit) >= wanted else (middle + 1, high)
    near = [at * unit for at in (low - 1, low) if at >= 1]
    return min(near, key=lambda width: abs(math.log(measure(width) / wanted)))
