"""muP: the base width is the standard parametrization, activations do not grow with the width, exports need no multipliers.

The coordinate check is that of arXiv 2203.03466, appendix D.1, figure 5. B batch, T sequence, V vocabulary, D width.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from ridgeline import models
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, OptimizerConfig, PrecisionConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config, parameter_shapes
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer, learning_rate_factor
from tests.sampling import drawn

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
FLOAT32 = PrecisionConfig(compute="float32")
BASE_WIDTH, HEAD = 64, 16
WIDTHS = (64, 128, 256, 512)
STEPS = 4
ROWS, LENGTH, VOCAB = 4, 32, 61
INIT_STD = 0.1
FLAT, FLAT_LOGITS, GROWS = 0.16, 0.25, 0.3
"""Slope of log mean |x| over log width: at most FLAT in size with muP, more than GROWS without it."""
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 0},
    "gpt2": {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "gated_mlp": False, "tie_embeddings": True}
    | {"attention_bias": True, "output_bias": True, "mlp_bias": True, "family": "gpt2"},
    "wide_heads": {"num_heads": 4, "tie_embeddings": True},
    "experts": {"family": "mixtral", "moe": {"experts": 4, "experts_per_token": 2}},
}


def model_of(width: int, variant: str, *, mup: bool, base: int = BASE_WIDTH) -> ModelConfig:
    """Return a model of this width; `wide_heads` has wider heads, the others more of them; `llama` has grouped queries."""
    fields = {"vocab_size": VOCAB, "num_layers": 2, "embed_dim": width, "num_heads": width // HEAD, "mlp_dim": 2 * width, "max_seq_len": 64}
    fields["init_std"] = INIT_STD
    fields |= VARIANTS[variant]
    if variant == "llama":
        fields["num_kv_heads"] = width // HEAD // 2
    section = {"base_embed_dim": base} | ({"base_head_dim": base // 4} if variant == "wide_heads" else {})
    return ModelConfig.model_validate(fields | ({"mup": section} if mup else {}))


def batch(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH + 1))


def trained(model: ModelConfig, steps: int, rate: float, kind: str = "adamw") -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
    """Return the losses and mean |x| at several places before each step [steps], and the parameters after `steps` steps on one batch."""
    compute, partitioner = ComputeConfig(attention=AttentionConfig(backend="reference")), Partitioner.single()
    create = lambda: models.build(model, compute, FLOAT32, partitioner, nnx.Rngs(params=7))  # noqa: E731
    structure, variables = nnx.split(nnx.eval_shape(create), nnx.Param)
    axes = jax.tree.map(lambda v: v.get_metadata()["axes"], variables, is_leaf=lambda v: isinstance(v, nnx.Variable))
    config = OptimizerConfig(kind=kind, learning_rate=rate, b2=0.95, weight_decay=0.1)
    optimizer = build_optimizer(config, FLOAT32, nnx.to_pure_dict(axes), None, model.width_ratio)
    tokens = batch(3)

    def loss_of(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        decoder = nnx.merge(structure, params)
        inputs, targets = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
        positions = jnp.broadcast_to(jnp.arange(LENGTH), inputs.shape)
        start = decoder.embed(inputs, positions)
        end, _ = decoder.run_blocks((decoder.blocks,), 0, start, positions, None)
        hidden = decoder.normalize(end)
        logits = decoder.logits(hidden)
        loss = jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])
        block = nnx.merge(*(lambda parts: (parts[0], jax.tree.map(lambda stack: stack[1], parts[1])))(nnx.split(decoder.blocks)))
        rotary = decoder.rotary(positions, windowed=False)
        seen = {
            "embedding": start,
            "attention": block.attention(start, block.attention_norm, rotary, None),
            "mlp": block.mlp(start, block.mlp_norm),
            "residual": end,
            "logits": logits,
        }
        return loss, seen

    def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]:
        params, state = carry
        (loss, seen), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params, learning_rate=jnp.float32(rate))
        return (jax.tree.map(jnp.add, params, updates), state), (loss, seen)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run() -> Any:
        params = nnx.to_pure_dict(nnx.split(create(), nnx.Param)[1])
        if "output" in params:
            params["output"] *= 0.0  # so that logits are learned only: random ones shrink with the width (appendix D.2)
        (params, _), (losses, seen) = jax.lax.scan(step, (params, optimizer.init(params)), None, length=steps)
        if "output" not in params:
            del seen["logits"]
        return losses, {name: jnp.mean(jnp.abs(x), range(1, x.ndim)) for name, x in seen.items()}, params

    losses, seen, params = jax.device_get(run())
    return losses, seen, params


def slopes(variant: str, *, mup: bool, widths: tuple[int, ...], rate: float = 0.005, kind: str = "adamw") -> dict[str, list[float]]:
    """Return place -> slope of log mean |x| over log width, before each step but the first."""
    runs = [trained(model_of(width, variant, mup=mup), STEPS + 1, rate, kind)[1] for width in widths]
    x = np.log(widths)
    return {place: [float(np.polyfit(x, np.log([run[place][t] for run in runs]), 1)[0]) for t in range(1, STEPS + 1)] for place in runs[0]}


def is_flat(found: dict[str, list[float]]) -> bool:
    return all(abs(slope) <= (FLAT_LOGITS if place == "logits" else FLAT) for place, each in found.items() for slope in each)


def test_activations_do_not_grow_with_the_width() -> None:
    found = slopes("llama", mup=True, widths=WIDTHS)
    assert {"embedding", "attention", "mlp", "residual", "logits"} == set(found)
    assert is_flat(found), found


def test_the_same_check_fails_without_mup() -> None:
    found = slopes("llama", mup=False, widths=(WIDTHS[0], WIDTHS[-1]))
    assert not is_flat(found)
    for place in ("attention", "mlp", "residual", "logits"):
        assert min(found[place]) > GROWS, (place, found)


@pytest.mark.parametrize("variant", drawn(["gpt2", "wide_heads", "experts"], 1))
def test_activations_of_other_architectures_do_not_grow(variant: str) -> None:
    found = slopes(variant, mup=True, widths=(64, 256))
    assert is_flat(found), found


def test_at_the_base_width_nothing_changes() -> None:
    losses, _, params = trained(model_of(32, "wide_heads", mup=True, base=32), 3, 0.01)
    standard, _, same = trained(model_of(32, "wide_heads", mup=False), 3, 0.01)
    assert losses.tobytes() == standard.tobytes() and losses[2] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, params, same)


def test_initial_values_and_learning_rates_are_those_of_table_8() -> None:
    """m = 4: variance of hidden matrices 1/m of the base's, of tables the same; the router is an output of table 3."""
    model, std = model_of(256, "experts", mup=True), INIT_STD
    wanted = {"embedding": (std, 1.0), "output": (std, 1.0), "router": (std / 4, 1 / 4), "final_norm.scale": (None, 1.0)}
    wanted |= dict.fromkeys(("query", "key", "value", "out", "gate", "up", "down"), (std / 2, 1 / 4))
    create = lambda: models.build(model, ComputeConfig(), FLOAT32, Partitioner.single(), nnx.Rngs(params=1))  # noqa: E731
    values = nnx.to_flat_state(nnx.state(jax.jit(create, compiler_options=QUICK_COMPILE)(), nnx.Param))
    seen = set()
    for path, parameter in values:
        name = ".".join(map(str, path))
        name = name if name in wanted else str(path[-1])
        if name not in wanted:
            continue
        seen.add(name)
        deviation, rate = wanted[name]
        axes = tuple(parameter.get_metadata()["axes"])
        assert learning_rate_factor(axes, 4.0) == rate, name
        if deviation is not None:
            assert float(jnp.std(parameter[...])) == pytest.approx(deviation, rel=0.1), name
    assert seen == set(wanted)


def test_decay_has_no_factor_of_the_width() -> None:
    """Without gradients every matrix shrinks by learning rate times decay, whatever its learning rate is."""
    axes, params = {"w": ("embed", "mlp"), "t": ("vocab", "embed")}, {"w": jnp.ones((8, 8)), "t": jnp.ones((8, 8))}
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.5), FLOAT32, axes, None, 4.0)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params, learning_rate=jnp.float32(0.1))
    for update in updates.values():
        np.testing.assert_allclose(update, -0.05, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "torch_class"),
    [
        ({"family": "llama", "num_kv_heads": 2}, "LlamaForCausalLM"),
        (VARIANTS["gpt2"], "GPT2LMHeadModel"),
        ({"family": "qwen3", "qk_norm": True, "num_kv_heads": 2, "norm_eps": 1e-6}, "Qwen3ForCausalLM"),
        (
            {"family": "gemma3", "norm": "rmsnorm_1p", "norm_position": "both", "qk_norm": True, "tie_embeddings": True}
            | {"activation": "gelu_tanh", "scale_embeddings": True, "head_dim": 16},
            "Gemma3ForCausalLM",
        ),
    ],
)
def test_an_export_computes_the_same_logits(fields: dict[str, Any], torch_class: str, tmp_path: Path) -> None:
    """transformers has no multipliers: they are in the weights. Norm scales are drawn, so that folding into them is seen."""
    section = {"base_embed_dim": 24} | ({} if fields["family"] == "gemma3" else {"base_head_dim": 6})
    base = {"vocab_size": VOCAB, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "mlp_dim": 96, "max_seq_len": 64, "init_std": 0.3}
    model = ModelConfig.model_validate(base | fields | {"mup": section})
    decoder = models.build(model, ComputeConfig(), FLOAT32, Partitioner.single(), nnx.Rngs(params=3))
    values = dict(nnx.to_flat_state(nnx.state(decoder, nnx.Param)))
    rng = np.random.default_rng(5)
    for path, parameter in values.items():
        if "scale" in path or "bias" in str(path[-1]):
            parameter[...] = parameter[...] + jnp.asarray(0.3 * rng.standard_normal(parameter.shape), jnp.float32)
    arrays = {".".join(map(str, path)): np.asarray(parameter[...]) for path, parameter in values.items()}
    assert arrays.keys() == parameter_shapes(model).keys()
    export_weights(model, lambda path, layer: arrays[path] if layer is None else arrays[path][layer], tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model, "float32", {})))
    tokens = batch(11)
    ours = jax.jit(lambda d, t: d.logits(d(t)), compiler_options=QUICK_COMPILE)(decoder, jnp.asarray(tokens))
    theirs = getattr(transformers, torch_class).from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.kind=muon", "optimizer.kind: muon has no learning rates by width; use adamw or lion"),
        ("optimizer.kind=adafactor", "adafactor has no learning rates by width"),
        ("lora.rank=4", "lora.rank: does not support muP; set lora.rank=null"),
        ("model.query_pre_attn_scalar=16", "set query_pre_attn_scalar to model.head_dim"),
        ("model.num_kv_heads=null model.latent_attention.kv_rank=16", "model.latent_attention: does not support muP"),
    ],
)
def test_what_has_no_width_rule_is_refused(override: str, message: str) -> None:
    mup = ("model.mup.base_embed_dim=96", "model.mup.base_head_dim=16", "optimizer.kind=adamw")
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load("quickstart", [*mup, *override.split()])
    assert load("quickstart", mup).config.model.width_ratio == 2
    assert math.isclose(load("quickstart", mup).config.model.query_scale, math.sqrt(16 / 32))
