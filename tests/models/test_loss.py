"""The chunked cross-entropy against the definition: values, gradients, memory, sharding.

B batch, T sequence, D width, V vocabulary rows.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.configs.schema import MeshConfig
from ridgeline.models.loss import LossSums, cross_entropy
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner

B, T, D, V = 4, 24, 16, 50


def inputs(dtype: str = "float32", rows_of_table: int = V) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x_BTD = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
    w_DV = jnp.asarray(rng.standard_normal((D, rows_of_table)), jnp.float32)
    targets_BT = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights_BT = jnp.asarray(rng.integers(0, 2, (B, T)) * rng.uniform(0.5, 2.0, (B, T)), jnp.float32)
    return x_BTD, w_DV, targets_BT, weights_BT


def naive(
    x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, z_loss: float, softcap: float | None = None
) -> LossSums:
    logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, w_DV[:, :V].astype(x_BTD.dtype), preferred_element_type=jnp.float32)
    if softcap is not None:
        logits_BTV = softcap * jnp.tanh(logits_BTV / softcap)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    correct_BT = jnp.argmax(logits_BTV, axis=-1) == targets_BT
    terms = ((lse_BT - target_BT), z_loss * lse_BT**2, jnp.ones_like(lse_BT), correct_BT)
    return LossSums(*(jnp.sum(weights_BT * term) for term in terms))


def chunked(partitioner: Partitioner, chunk: int, z_loss: float):
    def run(x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> LossSums:
        return cross_entropy(x_BTD, w_DV, targets_BT, weights_BT, vocab_size=V, chunk=chunk, z_loss=z_loss, partitioner=partitioner)

    return run


def with_gradients(run, arrays: tuple[jax.Array, ...]):
    def objective(x_BTD: jax.Array, w_DV: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = run(x_BTD, w_DV, *arrays[2:])
        return (sums.nats + sums.z) / sums.weight, sums

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(*arrays[:2])


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 20, 28, 10_000], ids=["one token", "divides", "does not divide", "whole"])
def test_value_and_gradients_equal_the_definition(chunk, z_loss) -> None:
    arrays = inputs(rows_of_table=V + 6)
    (value, sums), gradients = with_gradients(chunked(Partitioner.single(), chunk, z_loss), arrays)
    (want_value, want_sums), want_gradients = with_gradients(lambda *a: naive(*a, z_loss), arrays)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    for name, got, want in zip(LossSums._fields[:4], sums[:4], want_sums[:4], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
    for got, want in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_soft_capped_logits_equal_the_definition() -> None:
    """The cap is far below the largest logits; the padded columns stay without probability and gradient."""
    arrays, settings = inputs(rows_of_table=V + 6), {"z_loss": 1e-2, "softcap": 1.5}
    run = partial(cross_entropy, vocab_size=V, chunk=20, partitioner=Partitioner.single(), **settings)
    got, want = with_gradients(run, arrays), with_gradients(partial(naive, **settings), arrays)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7), got, want)


def test_a_gradient_that_is_reduced_before_the_layers_is_the_same_gradient() -> None:
    arrays = inputs()
    settings = {"vocab_size": V, "chunk": 20, "z_loss": 1e-2, "partitioner": Partitioner.single()}
    found = [with_gradients(partial(cross_entropy, reduce_first=first, **settings), arrays) for first in (False, True)]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_evaluation_gives_the_same_sums_as_training() -> None:
    arrays = inputs()
    run = chunked(Partitioner.single(), 20, 1e-2)
    (_, trained), _ = with_gradients(run, arrays)
    np.testing.assert_allclose(jax.jit(run)(*arrays)[:4], trained[:4], rtol=1e-6)


def test_padded_vocabulary_gets_no_probability_and_no_gradient() -> None:
    x_BTD, w_DV, *rest = inputs(rows_of_table=V + 6)
    w_DV = w_DV.at[:, V:].set(100.0)  # would win every row if it counted
    (_, sums), (_, dw_DV) = with_gradients(chunked(Partitioner.single(), 20, 0.0), (x_BTD, w_DV, *rest))
    assert np.all(np.asarray(dw_DV)[:, V:] == 0)
    np.testing.assert_allclose(sums.nats, naive(x_BTD, w_DV, *rest, 0.0).nats, rtol=1e-6)


def test_tokens_of_weight_zero_change_nothing() -> None:
    x_BTD, w_DV, targets_BT, _ = inputs()
    weights_BT = jnp.ones((B, T)).at[:, 10:].set(0)
    run = chunked(Partitioner.single(), 20, 1e-2)
    (_, sums), (dx_BTD, dw_DV) = with_gradients(run, (x_BTD, w_DV, targets_BT, weights_BT))
    (_, cut), (_, dw_cut_DV) = with_gradients(run, (x_BTD[:, :10], w_DV, targets_BT[:, :10], weights_BT[:, :10]))
    np.testing.assert_allclose(sums[:4], cut[:4], rtol=1e-6)
    np.testing.assert_allclose(dw_DV, dw_cut_DV, rtol=1e-5, atol=1e-7)
    assert np.all(np.asarray(dx_BTD)[:, 10:] == 0)


def test_bfloat16_inputs_keep_a_float32_loss_and_weight_gradient() -> None:
    arrays = inputs("bfloat16")
    (value, _), (dx_BTD, dw_DV) = with_gradients(chunked(Partitioner.single(), 20, 0.0), arrays)
    (want, _), (_, want_dw_DV) = with_gradients(lambda *a: naive(*a, 0.0), (arrays[0].astype(jnp.float32), *arrays[1:]))
    assert (value.dtype, dx_BTD.dtype, dw_DV.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, want, rtol=1e-2)
    np.testing.assert_allclose(dw_DV, want_dw_DV, atol=0.02 * float(jnp.abs(want_dw_DV).max()))


def test_gradients_through_one_term_alone_are_nan_not_wrong() -> None:
    x_BTD, w_DV, *rest = inputs()
    run = chunked(Partitioner.single(), 20, 1e-2)
    assert np.all(np.isnan(jax.grad(lambda w: run(x_BTD, w, *rest).nats)(w_DV)))


def test_memory_is_bounded_by_the_chunk_not_by_the_sequence() -> None:
    """With V = 8192 and 2048 tokens the logits would be 64 MiB (and their gradient as much); a chunk of 128 tokens needs 4 MiB."""
    x, w, targets = (
        jax.ShapeDtypeStruct((4, 512, 32), jnp.float32),
        jax.ShapeDtypeStruct((32, 8192), jnp.float32),
        jax.ShapeDtypeStruct((4, 512), jnp.int32),
    )
    ones = jnp.ones((4, 512))

    def loss_by(kind: str):
        def objective(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
            if kind == "chunked":
                sums = cross_entropy(x, w, targets, ones, vocab_size=8192, chunk=128, z_loss=0.0, partitioner=Partitioner.single())
                return sums.nats
            logits = jnp.einsum("btd,dv->btv", x, w)
            return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])

        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(x, w, targets).compile()

    logits_bytes = 4 * 512 * 8192 * 4
    naive_bytes, chunked_bytes = (loss_by(kind).memory_analysis().temp_size_in_bytes for kind in ("naive", "chunked"))
    assert naive_bytes >= logits_bytes
    assert chunked_bytes < logits_bytes / 4
    assert "2048,8192" not in loss_by("chunked").as_text()
    assert "4,512,8192" not in loss_by("chunked").as_text()


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 1}, {"fsdp": 1, "tensor": 2}], ids=str)
def test_sharded_loss_equals_one_device(mesh) -> None:
    arrays = inputs()
    config = MeshConfig(**{"fsdp": 1, **mesh})
    size = config.data * config.fsdp * config.tensor
    partitioner = Partitioner(build_mesh(config, jax.devices()[:size]))
    axes = (("batch", None, None), ("embed", "vocab"), ("batch", None), ("batch", None))
    placed = tuple(jax.device_put(a, partitioner.sharding(of)) for a, of in zip(arrays, axes, strict=True))
    (value, sums), gradients = with_gradients(chunked(partitioner, 6, 1e-2), placed)
    (want_value, want_sums), want_gradients = with_gradients(chunked(Partitioner.single(), 6, 1e-2), arrays)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(sums[:4], want_sums[:4], rtol=1e-6)
    for got, want in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_row_shards_never_communicate_inside_the_chunk_loop() -> None:
    """The sum over row shards happens once, after the scan."""
    partitioner = Partitioner(build_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4]))
    arrays = inputs()
    run = jax.jit(jax.grad(lambda x, w: chunked(partitioner, 6, 1e-2)(x, w, *arrays[2:]).nats, argnums=(0, 1)))
    text = run.lower(*arrays[:2]).compile().as_text()
    assert re.search(r"while\(", text), "the chunk loop must be there for this test to mean anything"
    inside = [
        line
        for line in text.splitlines()
        if re.search(r"(all-reduce|all-gather|reduce-scatter)(-start)?\(", line) and "/while/body" in line
    ]
    assert inside == []
