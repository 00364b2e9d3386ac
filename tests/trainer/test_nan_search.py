"""`ridge debug nan` on runs whose weights overflow at drawn places; the hooks of transformers' model say in which layer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from ridgeline import api, models
from ridgeline.cli.main import run as ridge
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ComputeConfig, Config, PrecisionConfig
from ridgeline.models import activation
from ridgeline.models.huggingface.convert import export_weights, hf_config
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.nonfinite_origin import find_origin
from ridgeline.trainer.run import train
from tests.sampling import drawn
from tests.trainer.test_run import corpus, make_config  # noqa: F401

LAYERS, LARGE = 4, 3e38
ALONE = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
Weights = dict[str, np.ndarray]


def start(directory: Path, change: Callable[[Weights], None], model: Mapping[str, Any] | None = None) -> Path:
    """A Hugging Face directory with changed weights. model: settings of the model."""
    model = settings(Path("corpus"), Path("run"), directory, model).model
    decoder = models.build(model, ComputeConfig(), PrecisionConfig(), Partitioner.single(), nnx.Rngs(params=4))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))[0]
    values = {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in leaves}
    change(values)
    directory.mkdir()
    export_weights(model, lambda path, layer: values[path] if layer is None else values[path][layer], directory, "float32")
    (directory / "config.json").write_text(json.dumps(hf_config(model, "float32", {})))
    return directory


def settings(
    corpus: Path,  # noqa: F811
    run_dir: Path,
    init_from: Path,
    model: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Config:
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    sections = {"mesh": mesh, "model": model or {"num_layers": LAYERS}, "evaluation": {"every": 0, "sets": {}}, "init_from": str(init_from)}
    return make_config(corpus, run_dir, trainer={"max_bad_steps": 2, **trainer}, **sections)


def failed(config: Config) -> Path:
    with pytest.raises(NumericalFailure):
        train(config, command=["test"])
    return config.directory


def first_module(directory: Path) -> str:
    """The first module of transformers' model whose output is not finite."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), list[str]()

    def hook(name: str) -> Callable[..., None]:
        def check(module: Any, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
                found.append(name)

        return check

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    with torch.no_grad():
        model(torch.randint(0, 258, (8, 32), generator=torch.Generator().manual_seed(0)))
    return found[0]


@pytest.mark.parametrize("part", drawn(["query", "key", "value", "gate", "up", "norm"], 1))
def test_the_layer_whose_forward_pass_overflows_is_named(
    part: str,
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layer = random.Random(part).randrange(LAYERS)

    def change(values: Weights) -> None:
        path = next(path for path in values if path.startswith("blocks.") and part in path)
        values[path][layer] = LARGE * np.sign(values[path][layer])

    directory = start(tmp_path / "base", change)
    module = first_module(directory)
    run = failed(settings(corpus, tmp_path / "run", directory, accumulation=2))
    capsys.readouterr()
    assert ridge(["debug", "nan", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"layers.{layer}." in module
    assert (found["step"], found["from_step"], found["pass"], found["layers"]) == (1, 0, "forward", [layer, layer])
    assert found["origin"]["result"] in ("inf", "nan") and found["origin"]["source"]
    assert ("mlp" in found["origin"]["scope"]) == (".mlp." in module), (found, module)


@pytest.mark.parametrize("stack", drawn(["dense_blocks", "blocks"], 1))
def test_layers_with_experts_and_dense_ones_that_take_turns_are_named_by_their_turn(
    stack: str,
    corpus: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Llama 4 with experts in every second layer: a turn of the loop is two layers."""
    turn = random.Random(stack).randrange(3)
    moe = {"experts": 4, "experts_per_token": 1, "expert_dim": 24, "shared_experts": 1, "score": "sigmoid", "normalize": False}
    attention = {"rope_interleaved": True, "attention_chunk": 16, "full_attention_every": 2, "full_attention_rope": False}
    model = {"family": "llama4", "num_layers": 6, **attention, "moe": moe | {"scale_input": True, "every": 2}}

    def change(values: Weights) -> None:
        path = next(path for path in values if path.startswith(f"{stack}.") and "gate" in path)
        values[path][turn] = LARGE * np.sign(values[path][turn])

    directory = start(tmp_path / "base", change, model)
    module = first_module(directory)
    found = api.find_nan(failed(settings(corpus, tmp_path / "run", directory, model)), overrides=ALONE)
    assert f"layers.{2 * turn + (stack == 'blocks')}." in module
    assert found.layers == (2 * turn, 2 * turn + 1)


def test_a_gradient_that_is_not_finite_is_traced_into_the_backward_pass(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sqrt has no gradient at 0."""
    monkeypatch.setitem(activation.ACTIVATIONS, "silu", lambda x: jnp.sqrt(jnp.abs(x)))

    def change(values: Weights) -> None:
        values["blocks.mlp.gate"][2] = 0

    run = failed(settings(corpus, tmp_path / "run", start(tmp_path / "base", change)))
    found = api.find_nan(run, overrides=ALONE)
    assert found.what.startswith("gradient of ") and found.layers == (2, 2) and found.origin is not None
    assert found.origin.backward and Path(found.origin.source.split(":")[0]).name == Path(__file__).name
    assert "backward pass, layer 2" in found.describe()


def test_a_norm_that_overflows_has_finite_gradients_and_a_finite_step_has_no_finding(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    def change(values: Weights) -> None:
        values["final_norm.scale"] *= 1e25
        values["output"] *= 1e-25

    run = failed(settings(corpus, tmp_path / "run", start(tmp_path / "base", change)))
    assert api.find_nan(run, overrides=ALONE).what == "gradient norm"
    sound = make_config(corpus, tmp_path / "sound", trainer={"steps": 3})
    train(sound, command=["test"])
    with pytest.raises(UserError, match="of every step were finite"):
        api.find_nan(sound.directory)
    with pytest.raises(UserError, match=r"--step 4: the run has trainer.steps=3"):
        api.find_nan(sound.directory, 4, overrides=ALONE)
    found = api.find_nan(sound.directory, 3, overrides=ALONE)
    assert (found.what, found.from_step) == ("", 2)


@pytest.mark.parametrize("seed", range(6))
def test_the_operation_is_found_through_loops_calls_and_branches(seed: int) -> None:
    """An overflow in a drawn iteration; constants that are infinite, as those of masks, are no origin."""
    rng = np.random.default_rng(seed)
    at, length = int(rng.integers(5)), 5
    w = jnp.asarray(rng.normal(size=(length, 4, 4)) * 0.1).at[at].set(200.0)

    @jax.jit
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        scores = jnp.where(jnp.arange(4) < 3, jnp.exp(jnp.abs(x @ w)), -jnp.inf)
        return jax.lax.cond(seed % 2 == 0, jax.nn.softmax, lambda s: jnp.where(s > 1e30, s, 0.01), scores)

    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, w: (x + block(x, w), None))
        return jnp.sum(jax.lax.scan(body, x, w, reverse=seed % 3 == 0)[0] ** 2)

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.fori_loop(0, length, lambda i, x: x + block(x, w[i]), x) ** 2)

    for function, result in ((scanned, 0), (looped, 0), (jax.value_and_grad(scanned), 1)):
        origin = find_origin(function, w, jnp.ones((2, 4)), result=result)
        assert origin is not None and (origin.operation, origin.result) == ("exp", "inf"), origin
        assert [loop.index for loop in origin.loops] == [at]
