"""Every attention backend against the reference, forward and backward, for every request it supports; and those it refuses.

B batch, T sequence, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal, jaxprs_in_params

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, MeshConfig, PrecisionConfig
from ridgeline.hlo.module import Module
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import kernels, total_flops
from ridgeline.models.attention import AttentionRequest, attend, backend_names, dispatch, pallas, resolve_backend
from ridgeline.models.attention.layer import Attention
from ridgeline.models.attention.masks import chunk_segments, visible
from ridgeline.models.parallelize import parallelize
from ridgeline.models.params import ParamFactory
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from tests.sampling import drawn, seed

CHUNK = 16
MASKS = {"causal": (True, None), "causal window": (True, 10), "full": (False, None), "symmetric window": (False, 7)}
HEADS = {"multi-head": (4, 4), "grouped": (4, 2)}
ODD_LENGTH = 37  # three blocks of 16, the last one partly filled
SIZES = {"whole blocks": (48, (4, 2)), "shorter than a block": (11, (4, 2)), "one kv head": (ODD_LENGTH, (3, 1))}
BACKENDS = ("xla", "chunked")
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""Nearly all the time of these tests is compilation."""


def packed_rows(batch: int, length: int, rng: np.random.Generator) -> jax.Array:
    """Rows of several segments of random length, the last part of some rows padding (0)."""
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        cuts = np.sort(rng.choice(np.arange(1, length), size=3, replace=False))
        for segment, (start, end) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            row[start:end] = segment
    rows[0, rows[0] == 0] = 4  # one row without padding
    return jnp.asarray(rows)


def inputs(heads: tuple[int, int], length: int, dtype: str) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(length + heads[0])
    arrays = [rng.standard_normal((2, length, n, 8)) for n in (heads[0], heads[1], heads[1], heads[0])]
    return tuple(jnp.asarray(a, dtype) for a in arrays)


@cache
def program(backend: str, mask: tuple[bool, int | None]) -> Callable[..., tuple[jax.Array, ...]]:
    """Output and gradients of a backend, compiled once for each shape, whatever the segments."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, ...]:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q, k, v, segment_ids=segment_ids, causal=mask[0], sliding_window=mask[1], backend=backend, chunk=CHUNK)

        out, pullback = jax.vjp(call, q, k, v)
        return out, *pullback(cotangent)

    return jax.jit(run, compiler_options=QUICK_COMPILE)


def result_and_gradients(
    backend: str, arrays: tuple[jax.Array, ...], segment_ids: jax.Array | None, mask: tuple[bool, int | None]
) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in program(backend, mask)(*arrays, segment_ids)]


def by_definition(
    arrays: tuple[jax.Array, ...], segment_ids: jax.Array | None, mask: tuple[bool, int | None]
) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Attention query by query in numpy float64, sharing no code with the backends; and the mask."""
    q, k, v = (np.asarray(a, np.float64) for a in arrays[:3])
    causal, window = mask
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    segments = np.ones((batch, length), int) if segment_ids is None else np.asarray(segment_ids)
    out, seen = np.zeros_like(q), [[[] for _ in range(length)] for _ in range(batch)]
    for b, t in itertools.product(range(batch), range(length)):
        keys = [s for s in range(length) if segments[b, s] == segments[b, t] != 0]
        if causal:
            keys = [s for s in keys if s <= t]
        if window is not None:
            keys = [s for s in keys if abs(t - s) < window]
        seen[b][t] = keys
        for n in range(heads if keys else 0):
            scores = k[b, keys, n // group] @ q[b, t, n] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ v[b, keys, n // group]
    return out, seen


@pytest.mark.parametrize("chunk", [1, 5, 16, ODD_LENGTH])
def test_chunks_are_segments_that_begin_with_their_document(chunk) -> None:
    """Two tokens are in the same segment where document and position // chunk are the same; padding stays padding."""
    rows = np.asarray(packed_rows(2, ODD_LENGTH, np.random.default_rng(chunk)))
    for given, segments in ((rows, rows), (None, np.ones_like(rows))):
        found = np.asarray(
            chunk_segments(None if given is None else jnp.asarray(given), rows.shape, chunk) if chunk < ODD_LENGTH else segments
        )
        first = np.array([[list(row).index(segment) for segment in row] for row in segments])
        part = (np.arange(ODD_LENGTH) - first) // chunk
        same = (segments[:, :, None] == segments[:, None]) & (part[:, :, None] == part[:, None])
        np.testing.assert_array_equal(found == 0, segments == 0)
        used = (segments != 0)[:, :, None] & (segments != 0)[:, None]
        np.testing.assert_array_equal((found[:, :, None] == found[:, None]) & used, same & used)
    assert chunk_segments(None, (2, chunk), chunk) is None  # a row of one chunk


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_the_reference_is_the_definition(mask, packed) -> None:
    arrays = inputs((4, 2), ODD_LENGTH, "float32")
    segment_ids = packed_rows(2, ODD_LENGTH, np.random.default_rng(0)) if packed else None
    out, seen = by_definition(arrays, segment_ids, mask)
    got, dq, dk, dv = result_and_gradients("reference", arrays, segment_ids, mask)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
    # The gradients are JAX's own; only the mask could be wrong.
    for b in range(2):
        used = set().union(*seen[b])
        for t in range(ODD_LENGTH):
            assert np.any(dv[b, t] != 0) == np.any(dk[b, t] != 0) == (t in used) or len(seen[b][t]) == 1
            assert np.any(dq[b, t] != 0) == (len(seen[b][t]) > 1)


def compare(length: int, heads: tuple[int, int], mask: tuple[bool, int | None], packed: bool) -> None:
    arrays = inputs(heads, length, "float32")
    segment_ids = packed_rows(2, length, np.random.default_rng(0)) if packed else None
    expected = result_and_gradients("reference", arrays, segment_ids, mask)
    for backend in BACKENDS:
        results = result_and_gradients(backend, arrays, segment_ids, mask)
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=f"{backend} {name}")


@pytest.mark.parametrize(
    ("heads", "packed"),
    [("grouped", True), ("grouped", False), ("multi-head", True)],
    ids=["grouped-packed", "grouped-one document", "multi-head-packed"],
)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_backends_agree_with_the_reference(heads, mask, packed) -> None:
    compare(ODD_LENGTH, HEADS[heads], mask, packed)


@pytest.mark.parametrize(("length", "mask"), [(ODD_LENGTH, "causal"), (ODD_LENGTH, "symmetric window"), (11, "causal window")])
def test_soft_capping_is_the_definition_forward_and_backward(length, mask) -> None:
    """Against JAX's gradients of the definition, with scores far above the cap."""
    q, k, v, cotangent = inputs((4, 2), length, "float32")
    segments, (causal, window), cap = packed_rows(2, length, np.random.default_rng(0)), MASKS[mask], 1.5
    index = jnp.arange(length)
    seen_BTS = visible(index, index, causal=causal, sliding_window=window, query_segments_BT=segments, key_segments_BS=segments)

    def definition(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgh,bskh->bkgts", 4 * q.reshape(2, length, 2, 2, 8), k) / np.sqrt(8)
        weights = jnp.exp(cap * jnp.tanh(scores / cap)) * seen_BTS[:, None, None]
        context = jnp.einsum("bkgts,bskh->btkgh", weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9), v)
        return context.reshape(q.shape)

    want, want_pullback = jax.vjp(definition, q, k, v)
    for backend in ("reference", "chunked", "auto"):
        call = partial(attend, segment_ids=segments, causal=causal, sliding_window=window, softcap=cap, backend=backend, chunk=CHUNK)
        got, pullback = jax.vjp(lambda q, k, v, call=call: call(4 * q, k, v), q, k, v)
        for one, other in zip((got, *pullback(cotangent)), (want, *want_pullback(cotangent)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=backend)


@pytest.mark.parametrize("backend", ["xla", "cudnn", "pallas"])
def test_backends_without_soft_capping_refuse_it_and_auto_does_not_take_them(backend) -> None:
    with pytest.raises(UserError, match=rf"{backend} does not support soft-capping .*supported here: reference, chunked"):
        resolve_backend(backend, request(softcap=50.0))
    assert resolve_backend("auto", request(softcap=50.0)).name == "chunked"


@pytest.mark.parametrize("mask", ["causal", "symmetric window"])
def test_sinks_are_the_definition_forward_and_backward(interpreted, mask) -> None:
    """Against JAX's gradients of one more key per head, whose value is zero; sinks far below, near and far above the scores."""
    q, k, v, cotangent = inputs((4, 2), ODD_LENGTH, "float32")
    sinks = jnp.asarray([-20.0, 0.5, 3.0, 30.0], jnp.float32)
    segments, (causal, window) = packed_rows(2, ODD_LENGTH, np.random.default_rng(0)), MASKS[mask]
    index = jnp.arange(ODD_LENGTH)
    seen_BTS = visible(index, index, causal=causal, sliding_window=window, query_segments_BT=segments, key_segments_BS=segments)

    def definition(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(2, ODD_LENGTH, 2, 2, 8), k) / np.sqrt(8)
        weights = jnp.exp(scores) * seen_BTS[:, None, None]
        weights /= weights.sum(-1, keepdims=True) + jnp.exp(sinks).reshape(2, 2, 1, 1)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)

    want, want_pullback = jax.vjp(definition, q, k, v, sinks)
    for backend in ("reference", "chunked", "pallas"):
        call = partial(attend, segment_ids=segments, causal=causal, sliding_window=window, backend=backend, chunk=CHUNK)
        got, pullback = jax.vjp(lambda q, k, v, sinks, call=call: call(q, k, v, sinks=sinks), q, k, v, sinks)
        for one, other in zip((got, *pullback(cotangent)), (want, *want_pullback(cotangent)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=backend)


@pytest.mark.parametrize("backend", ["xla", "cudnn"])
def test_backends_without_sinks_refuse_them_and_auto_takes_the_next_one(backend) -> None:
    with pytest.raises(UserError, match=rf"{backend} does not support attention sinks .*supported here: reference, chunked, pallas"):
        resolve_backend(backend, request(sinks=True))
    assert resolve_backend("auto", request(sinks=True)).name == "pallas"


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_backends_agree_with_the_reference_at_other_sizes(size, packed) -> None:
    compare(*size, mask=MASKS["causal window"], packed=packed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_backends_agree_with_the_float32_reference_in_bfloat16(backend, mask) -> None:
    arrays = inputs((4, 2), ODD_LENGTH, "bfloat16")
    segment_ids = packed_rows(2, ODD_LENGTH, np.random.default_rng(1))
    expected = result_and_gradients("reference", tuple(a.astype(jnp.float32) for a in arrays), segment_ids, mask)
    for got, want in zip(result_and_gradients(backend, arrays, segment_ids, mask), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_padding_gives_zeros_and_no_gradient(backend) -> None:
    arrays = inputs((4, 2), 24, "float32")
    segment_ids = jnp.asarray([[1] * 10 + [0] * 14, [0] * 24], jnp.int32)
    out, *gradients = result_and_gradients(backend, arrays, segment_ids, (True, None))
    padding = np.asarray(segment_ids) == 0
    assert np.all(np.isfinite(out))
    assert np.all(out[padding] == 0)
    assert np.any(out[~padding] != 0)
    for gradient in gradients:
        assert np.all(gradient[padding] == 0)
        assert np.any(gradient[~padding] != 0)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_window_counts_the_token_itself(backend) -> None:
    """With a window of 1 every token sees only itself, so the output is its value."""
    q, k, v, _ = inputs((2, 2), 37, "float32")
    out = attend(q, k, v, sliding_window=1, backend=backend, chunk=CHUNK)
    np.testing.assert_allclose(out, v, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_huge_scores_stay_finite(backend) -> None:
    q, k, v, cotangent = inputs((2, 2), ODD_LENGTH, "float32")
    for result in result_and_gradients(backend, (1e4 * q, 1e4 * k, v, cotangent), None, (True, None)):
        assert np.all(np.isfinite(result))


def blocks_visited(length: int, mask: tuple[bool, int | None]) -> int:
    """Pairs of blocks of queries and keys of which a query sees a key, by the mask of every pair of tokens of whole blocks."""
    blocks = -(-length // CHUNK)
    index = jnp.arange(blocks * CHUNK)
    seen = visible(index, index, causal=mask[0], sliding_window=mask[1])
    pairs = np.ones((blocks, blocks)) if seen is None else np.asarray(seen).reshape(blocks, CHUNK, blocks, CHUNK).any((1, 3))
    return int(pairs.sum())


@pytest.mark.parametrize("packed", drawn([False, True], 1), ids=str)
@pytest.mark.parametrize("mask", drawn(list(MASKS.values()), 2), ids=str)
def test_loops_over_blocks_are_counted_forward_recomputed_and_backward(mask, packed, monkeypatch) -> None:
    """The FLOPs read from the compiled program equal those of the blocks that are visited, whether XLA knows a count or not."""
    layers, batch, (heads, kv_heads), width = 3, 2, HEADS["grouped"], 8
    length = CHUNK * random.Random(f"{seed()} {mask} {packed}").randint(2, 9) - 3

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            run = partial(attend, causal=mask[0], sliding_window=mask[1], backend="chunked", chunk=CHUNK)
            return x + run(x, k, v, segment_ids=segment_ids), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, None, length=layers)[0])

    shapes = [jax.ShapeDtypeStruct((batch, length, n, width), jnp.float32) for n in (heads, kv_heads, kv_heads)]
    segments = jax.ShapeDtypeStruct((batch, length), jnp.int32) if packed else None

    def compiled() -> Module:
        step = jax.jit(lambda *arrays: jax.grad(loss, (0, 1, 2))(*arrays), compiler_options=QUICK_COMPILE)
        return parse(step.lower(*shapes, segments).compile().as_text())

    hidden = compiled()
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    known = compiled()
    matmuls = 2 + 2 + 5  # scores and output, twice; scores, and the gradients of weights, values, keys and queries
    expected = layers * matmuls * blocks_visited(length, mask) * 2 * batch * heads * CHUNK**2 * width
    for module in (hidden, known):
        assert module.unknown_loops == [] and total_flops(kernels(module)) == expected
    loops = [[i for _, i in module.instructions() if i.opcode == "while"] for module in (hidden, known)]
    unstated = [sum("known_trip_count" not in loop.attributes for loop in found) for found in loops]
    inner = 0 if mask == MASKS["full"] else 3  # the loops inside of those over blocks, whose bounds vary
    assert unstated == [3 + inner, inner], "the loops over blocks hide their count"
    assert sorted(loop.trip_count for loop in loops[0]) == sorted(loop.trip_count for loop in loops[1])


def test_chunked_keeps_no_scores() -> None:
    """Temporary memory grows with T, not with T squared as the reference's does."""

    def temporary_bytes(backend: str, length: int) -> int:
        q = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        grad = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v, backend=backend, chunk=128) ** 2), argnums=(0, 1, 2))
        return jax.jit(grad).lower(q, q, q).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes("chunked", 4096) < 6 * temporary_bytes("chunked", 1024)
    assert temporary_bytes("reference", 4096) > 12 * temporary_bytes("reference", 1024)
    assert temporary_bytes("chunked", 4096) < temporary_bytes("reference", 4096) / 10


@pytest.mark.parametrize("window", [None, 4096])
def test_packed_long_rows_of_auto_have_no_array_of_scores_or_masks(window) -> None:
    """In the step of a CPU, forward and backward, with the result recomputed; for GPUs see tests/trainer/test_aot.py."""
    length = 2**15
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1, 1)]
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(lambda *x: attend(*x, segment_ids=segment_ids, sliding_window=window))(q, k, v) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, segments).compile()
    elements = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[(\d[\d,]*)\]", compiled.as_text())]
    assert length * 16 <= max(elements) < length**2 / 100


def request(**changes) -> AttentionRequest:
    facts = {"platform": "gpu", "dtype": jnp.dtype(jnp.bfloat16), "head_dim": 128, "num_heads": 8, "num_kv_heads": 2}
    return AttentionRequest(**{**facts, "packed": False, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "NVIDIA GPUs only"),
        ({"platform": "tpu"}, "NVIDIA GPUs only"),
        ({"platform": "rocm"}, "NVIDIA GPUs only"),
        ({"dtype": jnp.dtype(jnp.float32)}, "not float32"),
        ({"head_dim": 36}, "not 36"),
        ({"head_dim": 256}, "not 256"),
        ({"causal": False, "sliding_window": 8}, "only with a causal mask"),
        ({"packed": True}, "no packed documents"),
    ],
)
def test_cudnn_refuses_what_it_does_not_support(changes, reason) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        resolve_backend("cudnn", request(**changes))
    assert "reference, xla, chunked" in str(caught.value)
    fused = changes.keys() & {"packed", "sliding_window"} or changes == {"head_dim": 36}
    assert resolve_backend("auto", request(**changes)).name == ("pallas" if fused else "chunked")


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": jnp.dtype(jnp.float16)}, {"sliding_window": 8}, {"head_dim": 64}, {"causal": False}, {"length": 37}]
)
def test_auto_takes_the_fastest_kernels_that_support_the_request(changes) -> None:
    assert resolve_backend("auto", request(**changes)).name == "cudnn"
    assert resolve_backend("auto", request(**changes, packed=True)).name == "pallas"


def test_asking_for_cudnn_on_cpu_is_refused_at_the_call() -> None:
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(UserError, match="the devices are cpu"):
        attend(q, q, q, backend="cudnn")


def test_unknown_backends_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'chunked'"):
        resolve_backend("chunkd", request())


def test_every_backend_is_in_the_matrix() -> None:
    """A new backend must join the comparison above (cudnn cannot: it needs a GPU; pallas has its own, being slow to interpret)."""
    assert set(backend_names()) == {"auto", "reference", "cudnn", "pallas", *BACKENDS}


@pytest.fixture
def interpreted(monkeypatch) -> None:
    """Pallas's kernels run by its interpreter, in blocks small enough to be several."""
    monkeypatch.setitem(dispatch.BACKENDS, "pallas", pallas.Pallas(interpret=True))
    monkeypatch.setattr(pallas, "BLOCK", CHUNK)


@pytest.mark.parametrize(
    ("length", "heads", "mask", "packed"),
    [
        (ODD_LENGTH, (4, 2), "causal", True),
        (ODD_LENGTH, (4, 4), "causal", False),
        (ODD_LENGTH, (3, 1), "causal window", True),
        (48, (4, 2), "full", True),
        (ODD_LENGTH, (4, 2), "symmetric window", False),
        (11, (4, 2), "causal", True),
    ],
)
def test_the_pallas_kernels_agree_with_the_reference(interpreted, length, heads, mask, packed) -> None:
    arrays = inputs(heads, length, "float32")
    segment_ids = packed_rows(2, length, np.random.default_rng(0)) if packed else None
    expected = result_and_gradients("reference", arrays, segment_ids, MASKS[mask])
    results = result_and_gradients("pallas", arrays, segment_ids, MASKS[mask])
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=name)


def test_the_pallas_kernels_round_as_the_others_in_bfloat16_and_leave_padding_alone(interpreted) -> None:
    arrays = inputs((4, 2), 24, "bfloat16")
    segment_ids = jnp.asarray([[1] * 10 + [0] * 14, [0] * 24], jnp.int32)
    results = result_and_gradients("pallas", arrays, segment_ids, MASKS["causal"])
    expected = result_and_gradients("reference", tuple(a.astype(jnp.float32) for a in arrays), segment_ids, MASKS["causal"])
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)
        assert np.all(got[np.asarray(segment_ids) == 0] == 0)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_ranges_of_keys_are_the_mask_and_no_visible_block_is_skipped(mask, packed) -> None:
    length, block = 48, 8
    segment_ids = packed_rows(3, length, np.random.default_rng(2)) if packed else None
    first, end = pallas.key_ranges((3, length), segment_ids, *mask)
    key = np.arange(length)
    got = (key >= np.asarray(first)[..., None]) & (key < np.asarray(end)[..., None])
    index = jnp.arange(length)
    want = visible(index, index, causal=mask[0], sliding_window=mask[1], query_segments_BT=segment_ids, key_segments_BS=segment_ids)
    want = np.broadcast_to(True if want is None else want, got.shape)
    np.testing.assert_array_equal(got, want)
    blocks = want.reshape(3, length // block, block, length // block, block).any(axis=(2, 4))
    queries = jnp.stack(pallas.query_ranges((3, length), segment_ids, *mask), -1)
    ranges = pallas.block_ranges(jnp.stack([first, end], -1), queries, block)
    for seen, (low, high) in (
        (blocks, np.moveaxis(ranges.key_blocks_BX2, -1, 0)),
        (blocks.swapaxes(1, 2), np.moveaxis(ranges.query_blocks_BX2, -1, 0)),
    ):
        visited = (np.arange(length // block) >= low[..., None]) & (np.arange(length // block) < high[..., None])
        assert np.all(visited >= seen)
        assert np.all(visited.any(axis=2) == seen.any(axis=2))
        assert visited.sum() <= seen.sum() + (0 if mask[0] or not packed else seen.shape[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "NVIDIA GPUs only, and the devices are cpu"),
        ({"platform": "rocm"}, "NVIDIA GPUs only, and the devices are rocm"),
        ({"dtype": jnp.dtype(jnp.float32)}, "not float32"),
        ({"head_dim": 256}, "head width of at most 128, not 256"),
    ],
)
def test_pallas_refuses_what_it_does_not_support(changes, reason) -> None:
    with pytest.raises(UserError, match=reason):
        resolve_backend("pallas", request(**changes))
    assert resolve_backend("pallas", request(sliding_window=8, length=37, packed=True)).name == "pallas"


def test_kernels_that_xla_cannot_cut_run_on_the_rows_and_heads_of_each_device(interpreted) -> None:
    """The same block on one device and on 2 x 2, with a gradient."""
    model = ModelConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=32)
    segment_ids = packed_rows(4, 24, np.random.default_rng(3))
    x = jnp.asarray(np.random.default_rng(4).standard_normal((4, 24, 32)), jnp.float32)

    def gradient(mesh: MeshConfig, devices: int) -> np.ndarray:
        partitioner = Partitioner(build_mesh(mesh, jax.devices()[:devices]), Rules.from_config(mesh))
        compute = ComputeConfig(attention=AttentionConfig(backend="pallas"))
        execution = parallelize(model, compute, PrecisionConfig(compute="float32"), partitioner)
        attention = Attention(model, execution, 0.02, ParamFactory(nnx.Rngs(0), jnp.dtype("float32")))
        return np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(attention(x, lambda x: x, None, segment_ids) ** 2)))(x))

    one = gradient(MeshConfig(fsdp=1), 1)
    np.testing.assert_allclose(gradient(MeshConfig(fsdp=2, tensor=2), 4), one, rtol=1e-4, atol=1e-6 * np.abs(one).max() + 1e-9)


@pytest.mark.parametrize(
    ("context", "window", "kernel", "sinks"),
    [(4, None, "chunked", False), (2, 10, "chunked", True), (2, None, "pallas", True)],
)
def test_kernels_of_the_ring_agree_with_the_reference(interpreted, context, window, kernel, sinks) -> None:
    """Packed rows, grouped queries, and halves that are no whole number of blocks; every kernel runs only where the mask is not empty."""
    length, mesh = 40, MeshConfig(fsdp=1, context=context)
    partitioner = Partitioner(build_mesh(mesh, jax.devices()[:context]), zigzag=True)
    order = partitioner.row_order(length)
    assert order is not None and sorted(order) == list(range(length))
    q, k, v, cotangent = inputs((4, 2), length, "float32")
    segment_ids = packed_rows(2, length, np.random.default_rng(0))
    dims = {"vocab_size": 64, "num_layers": 1, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 32}
    model = ModelConfig(**dims, sliding_window=window, attention_sinks=sinks)
    config = AttentionConfig(backend=kernel, chunk=8)
    sinks_N = jnp.asarray([-2.0, 0.0, 1.0, 9.0], jnp.float32) if sinks else None
    attention = dispatch.SelfAttention.resolve(model, config, "cpu", jnp.dtype("float32"), partitioner)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *qkv: attention(*qkv[:3], segment_ids, *qkv[3:]), q, k, v, sinks_N)
        return out, *pullback(cotangent)

    results = jax.jit(run, compiler_options=QUICK_COMPILE)(*(x[:, order] for x in (q, k, v, cotangent)))
    reference = partial(attend, segment_ids=segment_ids, sliding_window=window, backend="reference")
    out, pullback = jax.vjp(lambda q, k, v, sinks_N: reference(q, k, v, sinks=sinks_N), q, k, v, sinks_N)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, (out, *pullback(cotangent)), strict=False):
        np.testing.assert_allclose(got, want[:, order], rtol=2e-5, atol=2e-5, err_msg=name)
    if sinks:
        np.testing.assert_allclose(results[4], pullback(cotangent)[3], rtol=2e-5, atol=2e-5)


def zeros_in(jaxpr, shape):
    """How often a program, or one that it calls, writes float32 zeros of a shape that depend on nothing."""
    found = 0
    for equation in jaxpr.eqns:
        out = equation.outvars[0].aval
        constant = equation.primitive.name == "broadcast_in_dim" and isinstance(equation.invars[0], Literal)
        found += constant and out.shape == shape and out.dtype == jnp.float32
        found += sum(zeros_in(inner, shape) for inner in jaxprs_in_params(equation.params))
    return found


def unused_of_barriers(jaxpr):
    """How many results of barriers a program, or one that it calls, does not use: XLA drops them, and what they wait for."""
    found, used = 0, {each for equation in jaxpr.eqns for each in equation.invars if not isinstance(each, Literal)}
    used |= {each for each in jaxpr.outvars if not isinstance(each, Literal)}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found += sum(out not in used for out in equation.outvars)
        found += sum(unused_of_barriers(inner) for inner in jaxprs_in_params(equation.params))
    return found


def test_the_ring_writes_zeros_when_queries_and_gradients_are_there(interpreted) -> None:
    """XLA would write those of all layers at once, outside of the loop over layers."""
    context, length, (rows, heads, kv_heads, width) = 4, 40, (2, 4, 2, 8)
    partitioner = Partitioner(build_mesh(MeshConfig(fsdp=1, context=context), jax.devices()[:context]), zigzag=True)
    dims = {"vocab_size": 64, "num_layers": 1, "embed_dim": 32, "num_heads": heads, "num_kv_heads": kv_heads, "mlp_dim": 32}
    attention = dispatch.SelfAttention.resolve(
        ModelConfig(**dims), AttentionConfig(backend="pallas"), "cpu", jnp.dtype("bfloat16"), partitioner
    )
    shapes = [jax.ShapeDtypeStruct((rows, length, n, width), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    program = jax.make_jaxpr(jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v, None).astype(jnp.float32)), (0, 1, 2)))(*shapes)
    own = length // context
    for shape in ((rows, own // 2, heads, width), (rows, own, heads, width), (rows, own, kv_heads, width)):
        assert zeros_in(program.jaxpr, shape) == 0, shape
    assert unused_of_barriers(program.jaxpr) == 0


@pytest.mark.parametrize(("context", "window"), drawn([(2, None), (2, 9), (4, None), (4, 11)], 1))
def test_loops_of_the_ring_are_counted_by_the_mean_over_devices(context, window) -> None:
    """Forward and backward, FLOPs of the pairs of blocks that the devices visit, divided by the devices, in rows of one document."""
    block, half, (heads, kv_heads), width = 4, random.Random(f"{seed()} ring").choice((8, 10, 12)), HEADS["grouped"], 8
    length, mesh = 2 * context * half, MeshConfig(fsdp=1, context=context)
    partitioner = Partitioner(build_mesh(mesh, jax.devices()[:context]), zigzag=True)
    dims = {"vocab_size": 64, "num_layers": 1, "embed_dim": 32, "num_heads": heads, "num_kv_heads": kv_heads, "mlp_dim": 32}
    model = ModelConfig(**dims, sliding_window=window)
    config = AttentionConfig(backend="chunked", chunk=block)
    attention = dispatch.SelfAttention.resolve(model, config, "cpu", jnp.dtype("float32"), partitioner)
    gradient = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v, None)), (0, 1, 2))
    shapes = [jax.ShapeDtypeStruct((2, length, n, width), jnp.float32) for n in (heads, kv_heads, kv_heads)]
    module = parse(jax.jit(gradient, compiler_options=QUICK_COMPILE).lower(*shapes).compile().as_text())

    index = jnp.arange(length)
    seen = np.asarray(visible(index, index, causal=True, sliding_window=window)).reshape(2 * context, half, 2 * context, half)
    whole = -(-half // block)
    padded = np.pad(seen, ((0, 0), (0, whole * block - half)) * 2).reshape(2 * context, whole, block, 2 * context, whole, block)
    visited = int(padded.any((2, 5)).sum())
    assert module.unknown_loops == []
    counted, expected = total_flops(kernels(module)), visited / context * (2 + 5) * 2 * 2 * heads * block**2 * width
    assert counted == pytest.approx(expected, rel=1e-6)  # the stated means have six digits
    inner = {name for _, i in module.instructions() if i.name in module.estimated_loops for name in i.called}
    assert inner and not inner & module.certain, "executions of their bodies are not certain"
