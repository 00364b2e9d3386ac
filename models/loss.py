"""Cross-entropy over a large vocabulary without the [B, T, V] logits.

The sequence is split into chunks. A scan computes the logits of one chunk, its loss and its gradients, so that the backward pass needs no
logits: it only scales the gradients of the forward pass. The batch dim is not split inside a chunk because it is sharded.

Legend: R shards of tokens (rows, and with `context` pieces of rows), B rows per shard, T tokens of a row in a shard, C of them in one
chunk, D embed width,
V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ridgeline.models import mtp
from ridgeline.models.attention.masks import soft_cap
from ridgeline.models.distillation import METRICS, Teacher, divergence, top_tokens
from ridgeline.models.matmul.dense import matmul
from ridgeline.sharding.manual import sum_token_shards
from ridgeline.sharding.rules import TOKENS

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.models.decoder import Decoder
    from ridgeline.sharding.partition import Partitioner


class LossSums(NamedTuple):
    """Sums over all tokens, float32 scalars. The caller divides by the sum of weights: means do not add up over microbatches."""

    nats: jax.Array
    """Sum of weight * -log p(target)."""
    z: jax.Array
    """Sum of weight * z_loss * log(Z)^2, with the coefficient."""
    weight: jax.Array
    """Sum of the weights."""
    correct: jax.Array
    """Sum of the weights where the target has the largest logit."""
    distillation: jax.Array | None = None
    """With a teacher: sum of weight * a (T^2 KL - nats), a is distillation.weight."""
    divergence: jax.Array | None = None
    """With a teacher: sum of weight * KL(teacher || student)."""
    mtp: ModuleSums | None = None
    """With modules of multi-token prediction: their sums; `z` is of all heads, the others are of the model's own."""

    @property
    def objective(self) -> jax.Array:
        """What is differentiated: nats + z, with a teacher (1 - a) nats + a T^2 KL + z, with modules nats + z + their nats."""
        value = self.nats + self.z if self.distillation is None else self.nats + self.z + self.distillation
        return value if self.mtp is None else value + self.mtp.nats

    def means(self, total: jax.Array) -> dict[str, jax.Array]:
        """Return the metrics of a step. total: sum of the weights."""
        found = {"loss": self.nats, "z_loss": self.z, "accuracy": self.correct}
        if self.distillation is not None:
            assert self.divergence is not None
            found |= {"loss": self.nats + self.distillation, METRICS + "divergence": self.divergence, METRICS + "cross_entropy": self.nats}
        if self.mtp is not None:
            found |= {MODULES + name: value for name, value in self.mtp._asdict().items()}
        return {name: value / total for name, value in found.items()}

    @classmethod
    def of(cls, value: jax.Array, *, teacher: bool = False, modules: bool = False) -> LossSums:
        """Return sums that all have one value."""
        of_teacher = value if teacher else None
        return cls(value, value, value, value, of_teacher, of_teacher, ModuleSums(value, value, value) if modules else None)

    @classmethod
    def names(cls, *, teacher: bool, modules: bool = False) -> tuple[str, ...]:
        """Return the names of `means`."""
        of_teacher = (METRICS + "divergence", METRICS + "cross_entropy") if teacher else ()
        return "loss", "z_loss", "accuracy", *of_teacher, *((MODULES + name for name in ModuleSums._fields) if modules else ())


MODULES = "mtp_"
"""Prefix of the means of the modules of multi-token prediction."""


class ModuleSums(NamedTuple):
    """Sums of the modules of multi-token prediction, float32 scalars. Their weights have the factor loss.mtp_weight / modules."""

    nats: jax.Array
    """Sum of weight * -log p(target)."""
    weight: jax.Array
    """Sum of the weights."""
    correct: jax.Array
    """Sum of the weights where the target has the largest logit."""


def module_metrics(means: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the means of a step with the metrics of the modules in place of their sums; without modules the same means."""
    rest = {name: value for name, value in means.items() if not name.startswith(MODULES)}
    if len(rest) == len(means):
        return means
    sums = ModuleSums(*(means[MODULES + name] for name in ModuleSums._fields))
    weight = jnp.maximum(sums.weight, jnp.finfo(jnp.float32).tiny)
    return {**rest, MODULES + "loss": sums.nats / weight, MODULES + "accuracy": sums.correct / weight}


def loss_of(
    model: Decoder, config: Config, partitioner: Partitioner, x_BTD: jax.Array, rows: Mapping[str, jax.Array], *, frozen: bool = False
) -> LossSums:
    """Return the summed cross-entropy of `rows` (targets, weights [B, T]) from the normalized residual stream after the layers.

    With the teacher's arrays in `rows` (models/distillation.py), also the divergence from it. With those of modules of multi-token
    prediction (models/mtp.py), x has all heads (`Decoder.forward`), and the sums too. `frozen`: the unembedding has no gradient.
    """
    targets_BT, weights_BT, heads = rows["targets"], rows["weights"], 1
    if mtp.TARGETS in rows:
        heads += config.model.mtp_layers
        factor = config.loss.mtp_weight / config.model.mtp_layers
        targets_BT, weights_BT = mtp.of_all_heads(targets_BT, rows[mtp.TARGETS]), mtp.of_all_heads(weights_BT, factor * rows[mtp.WEIGHTS])
    return cross_entropy(
        x_BTD,
        model.unembedding(),
        targets_BT,
        weights_BT,
        vocab_size=config.model.vocab_size,
        chunk=config.compute.loss_chunk,
        z_loss=config.loss.z_loss,
        partitioner=partitioner,
        softcap=config.model.logit_softcap,
        reduce_first=config.compute.reduces_unembedding_first,
        frozen=frozen,
        teacher=Teacher.of(rows),
        teacher_weight=config.distillation.weight or 0.0,
        temperature=config.distillation.temperature,
        heads=heads,
    )


class _Settings(NamedTuple):
    vocab_size: int
    tokens_per_chunk: int
    softcap: float | None
    partitioner: Partitioner
    z_loss: float = 0.0
    reduce_first: bool = False
    frozen: bool = False
    teacher_weight: float = 0.0
    temperature: float = 1.0
    heads: int = 1


def _split(
    partitioner: Partitioner, shape: tuple[int, ...], chunk: int, vocab_size: int, softcap: float | None
) -> tuple[_Settings, Callable[[jax.Array], jax.Array]]:
    """Return the settings of a pass over a batch of this shape (B, T), and what splits an array [B, T, ...] into shards of tokens
    [R, B, T, ...], padded to whole chunks."""
    rows, pieces = partitioner.axis_size("batch"), partitioner.axis_size("seq")
    batch, length = shape
    assert batch % rows == 0 and length % pieces == 0, f"{batch} rows of {length} over {rows} x {pieces} shards"
    batch, length = batch // rows, length // pieces
    chunks = -(-length // max(1, chunk // batch))
    per_chunk = -(-length // chunks)

    def split_rows(a: jax.Array) -> jax.Array:
        split = a.reshape(rows, batch, pieces, length, *a.shape[2:]).swapaxes(1, 2)
        split = split.reshape(rows * pieces, batch, length, *a.shape[2:])
        padded = jnp.pad(split, [(0, 0), (0, 0), (0, chunks * per_chunk - length)] + [(0, 0)] * (a.ndim - 2))
        return partitioner.constrain(padded, TOKENS, *[None] * (padded.ndim - 1))

    return _Settings(vocab_size, per_chunk, softcap, partitioner), split_rows


def cross_entropy(
    x_BTD: jax.Array,
    w_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    vocab_size: int,
    chunk: int,
    z_loss: float,
    partitioner: Partitioner,
    softcap: float | None = None,
    reduce_first: bool = False,
    frozen: bool = False,
    teacher: Teacher | None = None,
    teacher_weight: float = 0.0,
    temperature: float = 1.0,
    heads: int = 1,
) -> LossSums:
    """Return the summed cross-entropy of targets under softmax(x w), in float32.

    `softcap`: of the logits (model.logit_softcap).
    x [B, T, D] in the compute dtype; w [D, V] the stored (sharded) parameter, cast to x's dtype and gathered here; targets int32, weights
    float32 [B, T]. Columns of w from vocab_size on are padding and get no probability. `chunk` tokens per device have logits at a time.
    `reduce_first`: w's gradient is reduced over devices before x's gradient is used, so that it is not whole in memory during the backward
    pass of the layers. `frozen`: w has no gradient. `teacher`: arrays [B, T, ...]; `teacher_weight` (distillation.weight), `temperature`:
    models/distillation.py. `heads`: of each row of tokens follow the model's own, then those of modules of multi-token prediction.
    z-loss: PaLM, arXiv 2204.02311, section 5. Differentiable in x and w through `LossSums.objective`, whose terms must have the same factor
    (anything else gives NaN gradients, never silently wrong ones).
    """
    with jax.named_scope("loss"):
        x_BTD = partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
        settings, split_rows = _split(partitioner, targets_BT.shape, chunk, vocab_size, softcap)
        settings = settings._replace(z_loss=z_loss, reduce_first=reduce_first, frozen=frozen)
        settings = settings._replace(teacher_weight=teacher_weight, temperature=temperature, heads=heads)
        weights_RBT = split_rows(jax.lax.stop_gradient(weights_BT.astype(jnp.float32)))
        return _cross_entropy(settings, split_rows(x_BTD), w_DV, split_rows(targets_BT), weights_RBT, jax.tree.map(split_rows, teacher))


def token_log_probs(model: Decoder, config: Config, partitioner: Partitioner, x_BTD: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Return the log-probability of each target, float32 [B, T], in a pass of the unembedding. Not differentiable.

    x and `rows` (targets [B, T]) as in `loss_of`.
    """
    return _of_tokens(model, config, partitioner, x_BTD, rows, config.model.vocab_size, lambda logits: logits.target_RBC - logits.lse_RBC)


def top_predictions(
    model: Decoder,
    config: Config,
    partitioner: Partitioner,
    x_BTD: jax.Array,
    rows: Mapping[str, jax.Array],
    *,
    count: int,
    temperature: float,
    vocab_size: int,
) -> Teacher:
    """Return the `count` most likely tokens of each position and their log-probabilities (`distillation.top_tokens`): [B, T, ...].

    The probabilities are over ids below `vocab_size`. x and `rows` (targets [B, T]) as in `loss_of`. Not differentiable.
    """

    def top(logits: _Logits) -> Teacher:
        return top_tokens(partitioner, temperature, logits.all_RBCV, count)

    found: Teacher = _of_tokens(model, config, partitioner, x_BTD, rows, vocab_size, top)
    return found


def _of_tokens(
    model: Decoder,
    config: Config,
    partitioner: Partitioner,
    x_BTD: jax.Array,
    rows: Mapping[str, jax.Array],
    vocab_size: int,
    of_chunk: Callable[[_Logits], Any],
) -> Any:
    """Return what `of_chunk` gives for the logits of every chunk (arrays [R, B, C, ...]), as arrays [B, T, ...]."""
    with jax.named_scope("loss"):
        x_BTD, shape = jax.lax.stop_gradient(x_BTD), rows["targets"].shape
        settings, split_rows = _split(partitioner, shape, config.compute.loss_chunk, vocab_size, config.model.logit_softcap)
        x_RBTD = split_rows(partitioner.constrain(x_BTD, "batch", "seq", "act_embed"))
        targets_RBT = split_rows(rows["targets"])
        used_DV = _gathered(settings, x_RBTD, jax.lax.stop_gradient(model.unembedding()))
        length, per_chunk = x_RBTD.shape[2], settings.tokens_per_chunk

        def of(index: jax.Array) -> Any:
            x, targets = _chunk(settings, index, x_RBTD, targets_RBT)
            return of_chunk(_chunk_logits(settings, x, used_DV, targets))

        def body(all_found: Any, index: jax.Array) -> tuple[Any, None]:
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * per_chunk, axis=2)
            return jax.tree.map(put, all_found, of(index)), None

        def start(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            whole = jnp.zeros((*leaf.shape[:2], length, *leaf.shape[3:]), leaf.dtype)
            return partitioner.constrain(whole, TOKENS, *[None] * (whole.ndim - 1))

        found, _ = jax.lax.scan(body, jax.tree.map(start, jax.eval_shape(of, jnp.int32(0))), jnp.arange(length // per_chunk))
        pieces = partitioner.axis_size("seq")

        def join(found_RBT: jax.Array) -> jax.Array:
            split = found_RBT[:, :, : shape[1] // pieces].reshape(-1, pieces, found_RBT.shape[1], shape[1] // pieces, *found_RBT.shape[3:])
            joined = split.swapaxes(1, 2).reshape(*shape, *found_RBT.shape[3:])
            return partitioner.constrain(joined, "batch", "seq", *[None] * (joined.ndim - 2))

        return jax.tree.map(join, found)


def row_log_probs(model: Decoder, config: Config, partitioner: Partitioner, x_BTD: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Return the log-probability of the targets of each row, weighted and summed over its tokens, float32 [B]. Not differentiable.

    x and `rows` as in `loss_of`.
    """
    log_prob_BT = token_log_probs(model, config, partitioner, x_BTD, rows)
    return partitioner.constrain(jnp.sum(log_prob_BT * jax.lax.stop_gradient(rows["weights"]), axis=1), "batch")


def _gathered(settings: _Settings, x: jax.Array, w_DV: jax.Array) -> jax.Array:
    return settings.partitioner.gather_param(w_DV.astype(x.dtype), "embed", "vocab")


def _chunk(settings: _Settings, index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Return the chunk `index` of arrays [R, B, T, ...]."""
    return [jax.lax.dynamic_slice_in_dim(a, index * settings.tokens_per_chunk, settings.tokens_per_chunk, 2) for a in arrays]


class _Logits(NamedTuple):
    """Logits of one chunk, float32."""

    all_RBCV: jax.Array
    lse_RBC: jax.Array
    """Log-sum-exp."""
    target_RBC: jax.Array
    """Of the target."""
    top_RBC: jax.Array
    """The largest."""


def _chunk_logits(settings: _Settings, x_RBCD: jax.Array, used_DV: jax.Array, targets_RBC: jax.Array) -> _Logits:
    logits = jnp.einsum("rbcd,dv->rbcv", x_RBCD, used_DV, preferred_element_type=jnp.float32)
    logits = soft_cap(settings.partitioner.constrain(logits, TOKENS, None, None, "act_vocab"), settings.softcap)
    if logits.shape[-1] > settings.vocab_size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < settings.vocab_size, logits, jnp.finfo(jnp.float32).min)
    top = jnp.max(logits, axis=-1)
    lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    if settings.partitioner.axis_size("act_vocab") == 1:
        target = jnp.take_along_axis(logits, targets_RBC[..., None], axis=-1)[..., 0]
    else:  # indexing along a sharded dim would all-gather the logits; a masked sum is local
        target = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets_RBC[..., None], logits, 0), axis=-1)
    return _Logits(logits, lse, target, top)


class _ChunkSums(NamedTuple):
    """The sums of one chunk, and what its gradient needs."""

    sums: LossSums
    """Per row shard [R]."""
    logits_RBCV: jax.Array
    """float32."""
    lse_RBC: jax.Array
    """Their log-sum-exp."""
    slope_RBCV: jax.Array | None
    """Gradient of T^2 KL in the logits; None without a teacher."""


def _chunk_sums(
    settings: _Settings, x_RBCD: jax.Array, used_DV: jax.Array, targets_RBC: jax.Array, weights_RBC: jax.Array, teacher: Teacher | None
) -> _ChunkSums:
    logits, lse, target, top = _chunk_logits(settings, x_RBCD, used_DV, targets_RBC)
    nats = lse - target
    z = settings.z_loss * jnp.sum(weights_RBC * jnp.square(lse), axis=(1, 2))
    counted = weights_RBC, weights_RBC * nats, weights_RBC * (target >= top)
    (weight, own_nats, correct), *modules = zip(*(_sums_of_heads(settings, values_RBC) for values_RBC in counted), strict=True)
    sums = LossSums(own_nats, z, weight, correct, mtp=ModuleSums(modules[0][1], modules[0][0], modules[0][2]) if modules else None)
    if teacher is None:
        return _ChunkSums(sums, logits, lse, None)
    kl, slope = divergence(settings.partitioner, settings.temperature, logits, lse, teacher)
    change = settings.teacher_weight * (settings.temperature**2 * kl - nats)
    sums = sums._replace(
        distillation=jnp.sum(weights_RBC * change, axis=(1, 2)),
        divergence=jnp.sum(weights_RBC * kl, axis=(1, 2)),
    )
    return _ChunkSums(sums, logits, lse, slope)


def _sums_of_heads(settings: _Settings, x_RBC: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums [R] over the tokens of the model's own head and, where there are modules, of all of these."""
    if settings.heads == 1:
        return (jnp.sum(x_RBC, axis=(1, 2)),)
    sums_RH = jnp.sum(x_RBC.reshape(x_RBC.shape[0], -1, settings.heads, x_RBC.shape[-1]), axis=(1, 3))
    return sums_RH[:, 0], jnp.sum(sums_RH[:, 1:], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    settings: _Settings, x_RBTD: jax.Array, w_DV: jax.Array, targets_RBT: jax.Array, weights_RBT: jax.Array, teacher: Teacher | None
) -> LossSums:
    used_DV = _gathered(settings, x_RBTD, w_DV)

    def body(sums: LossSums, index: jax.Array) -> tuple[LossSums, None]:
        x, targets, weights = _chunk(settings, index, x_RBTD, targets_RBT, weights_RBT)
        more = _chunk_sums(settings, x, used_DV, targets, weights, _chunk_of(settings, index, teacher)).sums
        return jax.tree.map(jnp.add, sums, more), None

    sums_R, _ = jax.lax.scan(body, _zeros(settings, x_RBTD, teacher), jnp.arange(x_RBTD.shape[2] // settings.tokens_per_chunk))
    return jax.tree.map(jnp.sum, sums_R)


def _chunk_of(settings: _Settings, index: jax.Array, teacher: Teacher | None) -> Teacher | None:
    return None if teacher is None else Teacher(*_chunk(settings, index, *teacher))


def _zeros(settings: _Settings, x_RBTD: jax.Array, teacher: Teacher | None) -> LossSums:
    """One sum per row shard: summing over shards inside the loop would communicate in every chunk."""
    zeros_R = settings.partitioner.constrain(jnp.zeros(x_RBTD.shape[:1], jnp.float32), TOKENS)
    return LossSums.of(zeros_R, teacher=teacher is not None, modules=settings.heads > 1)


def _forward(
    settings: _Settings, x_RBTD: jax.Array, w_DV: jax.Array, targets_RBT: jax.Array, weights_RBT: jax.Array, teacher: Teacher | None
) -> tuple[LossSums, Any]:
    """Compute the sums and, for a unit cotangent of the objective, the gradients of x (x's dtype) and w (float32)."""
    used_DV = _gathered(settings, x_RBTD, w_DV)
    constrain = settings.partitioner.constrain

    def body(carry: tuple[LossSums, jax.Array, Any], index: jax.Array) -> tuple[tuple[LossSums, jax.Array, Any], None]:
        sums, dx_RBTD, dw_RDV = carry
        x, targets, weights = _chunk(settings, index, x_RBTD, targets_RBT, weights_RBT)
        more, logits, lse, slope = _chunk_sums(settings, x, used_DV, targets, weights, _chunk_of(settings, index, teacher))
        share = 1.0 - settings.teacher_weight if slope is not None else 1.0
        probability = jnp.exp(logits - lse[..., None]) * (weights * (share + 2 * settings.z_loss * lse))[..., None]
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        dlogits = probability - jnp.where(is_target, share * weights[..., None], 0)
        if slope is not None:
            dlogits += settings.teacher_weight * weights[..., None] * slope
        if settings.softcap is not None:  # the derivative of tanh is 1 - tanh^2; padding has probability 0
            dlogits *= 1 - jnp.square(jnp.maximum(logits / settings.softcap, -1))
        dlogits = dlogits.astype(x.dtype)
        dx = matmul(settings.partitioner, "rbcv,dv->rbcd", dlogits, used_DV)
        if dw_RDV is not None:
            dw_RDV += jnp.einsum("rbcd,rbcv->rdv", x, dlogits, preferred_element_type=jnp.float32)
            dw_RDV = constrain(dw_RDV, TOKENS, None, "act_vocab")
        dx_RBTD = jax.lax.dynamic_update_slice_in_dim(dx_RBTD, dx, index * settings.tokens_per_chunk, 2)
        return (jax.tree.map(jnp.add, sums, more), dx_RBTD, dw_RDV), None

    start = (
        _zeros(settings, x_RBTD, teacher),
        constrain(jnp.zeros_like(x_RBTD), TOKENS, None, None, None),
        None if settings.frozen else constrain(jnp.zeros((x_RBTD.shape[0], *w_DV.shape), jnp.float32), TOKENS, None, "act_vocab"),
    )
    (sums_R, dx_RBTD, dw_RDV), _ = jax.lax.scan(body, start, jnp.arange(x_RBTD.shape[2] // settings.tokens_per_chunk))
    if dw_RDV is None:
        return jax.tree.map(jnp.sum, sums_R), (dx_RBTD, None)
    dw_DV = sum_token_shards(settings.partitioner, dw_RDV, "embed", "vocab").astype(w_DV.dtype)
    if settings.reduce_first:
        dx_RBTD, dw_DV = jax.lax.optimization_barrier((dx_RBTD, dw_DV))
    return jax.tree.map(jnp.sum, sums_R), (dx_RBTD, dw_DV)


def _backward(
    settings: _Settings, residuals: tuple[jax.Array, jax.Array | None], cotangent: LossSums
) -> tuple[jax.Array, jax.Array | None, None, None, None]:
    dx_RBTD, dw_DV = residuals
    factor = cotangent.nats
    if settings.z_loss:
        factor = jnp.where(cotangent.nats == cotangent.z, factor, jnp.nan)
    if cotangent.distillation is not None:
        factor = jnp.where(cotangent.nats == cotangent.distillation, factor, jnp.nan)
    if cotangent.mtp is not None:
        factor = jnp.where(cotangent.nats == cotangent.mtp.nats, factor, jnp.nan)
    dw_DV = None if dw_DV is None else (dw_DV * factor).astype(dw_DV.dtype)
    return (dx_RBTD * factor).astype(dx_RBTD.dtype), dw_DV, None, None, None


_cross_entropy.defvjp(_forward, _backward)
