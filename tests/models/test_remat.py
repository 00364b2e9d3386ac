"""Every rematerialization policy: the same numbers, and it saves and recomputes what it documents."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.remat import NAMES, POLICIES
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, RematConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.remat import Remat
from tests.models.tiny import BASE, build, tokens, value_and_grad
from tests.sampling import drawn

LAYERS, ROWS, LENGTH = 3, 2, 16
STREAM_BYTES = 4 * LAYERS * ROWS * LENGTH * BASE["embed_dim"]
HIDDEN_BYTES = 4 * LAYERS * ROWS * LENGTH * BASE["mlp_dim"]
CONTEXT_BYTES = STREAM_BYTES  # num_heads * head_dim = embed_dim
LSE_BYTES = 4 * LAYERS * ROWS * LENGTH * BASE["num_heads"]

CONFIGS = {
    "none": RematConfig(policy="none"),
    "full": RematConfig(policy="full"),
    "dots": RematConfig(policy="dots"),
    "attention-only": RematConfig(policy="attention-only"),
    "names": RematConfig(policy="names", names=["attention_context", "attention_lse", "mlp_up"]),
    "one name": RematConfig(policy="names", names=["mlp_up"]),
}


@functools.cache
def decoder_with(policy: str, backend: str = "chunked") -> Decoder:
    return build(ModelConfig(**BASE), ComputeConfig(remat=CONFIGS[policy], attention=AttentionConfig(backend=backend, chunk=8)))


def pullback_of(decoder: Decoder, dtype: Any = jnp.float32) -> Any:
    """What the forward pass of the blocks leaves for the backward pass, parameters and inputs included: shapes and dtypes."""
    blocks, state = nnx.split(decoder)

    def forward(state: nnx.State, x_BTD: jax.Array) -> jax.Array:
        merged = nnx.merge(blocks, state)
        merged.model = merged.model.model_copy(update={"position": "learned"})  # no rotary table, which would be kept too
        return merged.run_blocks((merged.blocks,), 0, x_BTD, jnp.zeros((ROWS, LENGTH), jnp.int32), None)[0]

    x_BTD = jax.ShapeDtypeStruct((ROWS, LENGTH, BASE["embed_dim"]), dtype)
    return jax.eval_shape(lambda state, x: jax.vjp(forward, state, x)[1], state, x_BTD)


def kept_bytes(decoder: Decoder, dtype: Any = jnp.float32) -> int:
    """Bytes that the forward pass of the blocks leaves for the backward pass, parameters and inputs aside."""
    inputs = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(nnx.state(decoder.blocks)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback_of(decoder, dtype))) - inputs


def matmuls(decoder: Decoder) -> int:
    """Matmuls in the program of loss and gradients (each layer's loop body once)."""
    graphdef, state = nnx.split(decoder)
    tokens_BT = tokens(ROWS, LENGTH)
    return str(jax.make_jaxpr(jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(tokens_BT))))(state)).count("dot_general")


@functools.cache
def expected() -> tuple[jax.Array, Any]:
    return value_and_grad(decoder_with("none"), tokens(ROWS, LENGTH))


@pytest.mark.parametrize("policy", [policy for policy in CONFIGS if policy != "none"])
def test_every_policy_gives_the_same_loss_and_gradients(policy) -> None:
    want, want_grads = expected()
    value, grads = value_and_grad(decoder_with(policy), tokens(ROWS, LENGTH))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, want_grads)


WAITING = {
    "mlp": (CONFIGS["full"], {}),
    "block": (RematConfig(policy="names", names=["mlp_up"]), {}),
    "mlp, experts": (CONFIGS["full"], {"moe": MoEConfig(experts=4, experts_per_token=2, expert_dim=24)}),
    "block, experts": (RematConfig(policy="names", names=["mlp_gate"]), {"moe": MoEConfig(experts=4, experts_per_token=2, expert_dim=24)}),
}


@pytest.mark.parametrize("case", drawn(list(WAITING), 2))
def test_recomputation_that_waits_for_gradients_gives_the_same_loss_and_gradients(case: str) -> None:
    """It also keeps nothing more, and leaves the sums of the routers."""
    config, more = WAITING[case]
    plain, waiting = (build(ModelConfig(**BASE | more), ComputeConfig(remat=config, attention=AttentionConfig(chunk=8))) for _ in "12")
    remat = dataclasses.replace(waiting.execution.remat, waits=case.split(",")[0])
    waiting.execution = dataclasses.replace(waiting.execution, remat=remat)
    waiting.blocks.remat = waiting.execution.remat
    (value, grads), (want, want_grads) = (value_and_grad(each, tokens(ROWS, LENGTH)) for each in (waiting, plain))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, want_grads)
    assert kept_bytes(waiting) == kept_bytes(plain)
    totals, want_totals = (each.forward(tokens(ROWS, LENGTH))[1] for each in (waiting, plain))
    assert (totals is None) == (not more)
    jax.tree.map(np.testing.assert_array_equal, totals, want_totals)


@pytest.mark.parametrize("policy", CONFIGS)
def test_modules_of_multi_token_prediction_do_not_wait(policy: str) -> None:
    """They are outside of the loop, and functions of more than a block's input; also where the blocks wait, as those of two kinds do."""
    model = ModelConfig(**BASE | {"num_layers": 4, "mtp_layers": 1, "sliding_window": 5, "full_attention_every": 2})
    future_BTM = tokens(ROWS, LENGTH, seed=1)[..., None]

    def hidden_and_grads(policy: str) -> tuple[jax.Array, Any]:
        decoder = build(model, ComputeConfig(remat=CONFIGS[policy], attention=AttentionConfig(backend="chunked", chunk=8)))
        assert decoder.execution.remat.waits == "block"
        graphdef, state = nnx.split(decoder)
        weights = jnp.cos(jnp.arange(2 * ROWS * LENGTH * BASE["embed_dim"], dtype=jnp.float32))

        def total(state: nnx.State) -> jax.Array:
            hidden = nnx.merge(graphdef, state).forward(tokens(ROWS, LENGTH), future_BTM=future_BTM)[0]
            return jnp.vdot(weights, hidden.reshape(-1))

        value, grads = jax.jit(jax.value_and_grad(total))(state)
        return value, nnx.to_pure_dict(grads)

    (value, grads), (want, want_grads) = hidden_and_grads(policy), hidden_and_grads("none")
    np.testing.assert_allclose(value, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, want_grads)


def test_policies_keep_what_they_claim() -> None:
    kept = {policy: kept_bytes(decoder_with(policy)) for policy in CONFIGS}
    small = LSE_BYTES  # norms and scalars
    assert kept["full"] <= STREAM_BYTES + small
    assert kept["one name"] == kept["full"] + HIDDEN_BYTES
    assert kept["names"] == kept["one name"] + CONTEXT_BYTES + LSE_BYTES
    assert kept["full"] < kept["names"] < kept["dots"] < kept["none"]
    assert kept["none"] - kept["attention-only"] >= LSE_BYTES


def test_dots_keeps_what_the_experts_matmuls_return() -> None:
    """As it keeps the hidden activations of an MLP; and the router's logits."""
    moe = MoEConfig(experts=4, experts_per_token=2, expert_dim=24)
    attention = AttentionConfig(backend="chunked", chunk=8)
    kept = {
        policy: kept_bytes(build(ModelConfig(**BASE, moe=moe), ComputeConfig(remat=CONFIGS[policy], attention=attention)))
        for policy in ("full", "dots")
    }
    of_attention = kept_bytes(decoder_with("dots")) - kept_bytes(decoder_with("full")) - 2 * HIDDEN_BYTES
    hidden, logits = (4 * LAYERS * ROWS * LENGTH * width for width in (2 * 24, 4))
    assert 2 * hidden <= kept["dots"] - kept["full"] - of_attention <= 2 * hidden + logits


@pytest.mark.parametrize("policy", [name for name, config in CONFIGS.items() if POLICIES[config.policy].recomputes_block])
@pytest.mark.parametrize("period", [2, 4])
def test_no_copy_of_the_parameters_is_kept_where_a_turn_of_the_loop_runs_layers_of_several_kinds(policy: str, period: int) -> None:
    """Each is chosen from the parameters of the turn within what is recomputed: [turns, period, ...] and not `period` of [turns, ...]."""
    model = ModelConfig(**BASE | {"num_layers": 8, "sliding_window": 8, "full_attention_every": period})
    decoder = build(model, ComputeConfig(remat=CONFIGS[policy], attention=AttentionConfig(backend="chunked", chunk=8)))
    kept = [leaf.shape for leaf in jax.tree.leaves(pullback_of(decoder))]
    matrices = [leaf.shape[1:] for leaf in jax.tree.leaves(nnx.state(decoder.blocks.mlp))]
    assert {(8, *shape) for shape in matrices} == {leaf.shape for leaf in jax.tree.leaves(nnx.state(decoder.blocks.mlp))}
    assert all((8 // period, period, *shape) in kept and (8 // period, *shape) not in kept for shape in matrices)


def test_inputs_of_matmuls_that_can_be_recomputed_are_not_saved() -> None:
    """The two normed inputs and the gated product."""
    keeping = build(ModelConfig(**BASE), ComputeConfig(remat=CONFIGS["none"], attention=AttentionConfig(backend="chunked", chunk=8)))
    # attention and MLP of a block that is recomputed as a whole have no checkpoints of their own; here the block has none either
    unwrapped = dataclasses.replace(keeping.execution, remat=Remat("full"))
    keeping.blocks.mlp.execution = keeping.blocks.attention.execution = unwrapped
    assert kept_bytes(keeping) - kept_bytes(decoder_with("none")) == 2 * STREAM_BYTES + HIDDEN_BYTES


def test_attention_only_keeps_no_scores() -> None:
    scores_bytes = 4 * LAYERS * ROWS * BASE["num_heads"] * LENGTH * LENGTH
    assert kept_bytes(decoder_with("none", "reference")) - kept_bytes(decoder_with("attention-only", "reference")) >= scores_bytes


def test_policies_recompute_what_they_claim() -> None:
    count = {policy: matmuls(decoder_with(policy)) for policy in CONFIGS}
    projections, attention = 7, 2  # query, key, value, out, gate, up, down; scores and context
    assert count["attention-only"] == count["none"] + attention
    assert count["dots"] == count["none"] + attention
    # The recomputed MLP output is not used: its matmul is not repeated.
    assert count["full"] == count["none"] + projections - 1 + attention
    assert count["one name"] == count["full"] - 1
    assert count["names"] == count["one name"] - attention


def test_offload_moves_the_named_values_to_host_memory() -> None:
    """On a device with host memory; here the program is only traced, because on CPU both memories are the same."""
    remat = Remat.resolve(RematConfig(policy="offload", names=["mlp_up"]), platform="gpu")
    decoder = build(compute=ComputeConfig(remat=CONFIGS["one name"]))
    decoder.execution = dataclasses.replace(decoder.execution, remat=remat)
    graphdef, state = nnx.split(decoder)
    program = str(jax.make_jaxpr(jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(tokens(ROWS, LENGTH)))))(state))
    hidden = f"{ROWS},{LENGTH},{BASE['mlp_dim']}"
    assert f"f32<host>[{hidden}]" in program
    want, want_grads = expected()
    value, grads = value_and_grad(decoder, tokens(ROWS, LENGTH))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, want_grads)


@pytest.mark.parametrize(
    ("config", "platform", "message"),
    [
        ({"policy": "ful"}, "cpu", "did you mean 'full'"),
        ({"policy": "names", "names": ["mlp_upp"]}, "cpu", "did you mean 'mlp_up'"),
        ({"policy": "names"}, "cpu", r"needs compute\.remat\.names"),
        ({"policy": "full", "names": ["mlp_up"]}, "cpu", r"compute\.remat\.names"),
        ({"policy": "offload", "names": ["mlp_up"]}, "cpu", r"compute\.remat\.policy=offload .* cpu .*use names"),
    ],
)
def test_bad_settings_are_refused(config, platform, message) -> None:
    with pytest.raises(UserError, match=message):
        Remat.resolve(RematConfig(**config), platform)


def test_the_documented_names_are_those_tagged() -> None:
    graphdef, state = nnx.split(decoder_with("none"))
    program = str(jax.make_jaxpr(jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(tokens(ROWS, LENGTH)))))(state))
    assert set(re.findall(r"name\[name=(\w+)\]", program)) == set(NAMES)


def test_every_policy_is_tested() -> None:
    assert {config.policy for config in CONFIGS.values()} | {"offload"} == set(POLICIES)
