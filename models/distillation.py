"""Divergence of a student from the k most likely tokens of a teacher, and what it needs of logits whose vocabulary may be sharded.

With p the teacher's and q the student's probabilities at temperature T (softmax of logits / T), and K the teacher's k tokens:

    bucket        KL = sum over K of p log(p / q) + r log(r / s),   r = 1 - sum over K of p,   s = 1 - sum over K of q
    renormalize   KL = sum over K of p' log(p' / q'),               p' and q' are p and q divided by their sums over K

`bucket` makes one outcome of all other tokens (the K+1 logits of NeMo-Aligner). It is a lower bound of the full divergence, and equal to it
where K is the whole vocabulary. `renormalize` ignores how much probability the student gives to other tokens; such estimates are biased
(Anshumann et al., arXiv 2503.16870, section 3). The factor T^2 of the loss keeps gradients of one size at every temperature (Hinton et
al., arXiv 1503.02531, section 2).

Legend: R shards of tokens, B rows per shard, C tokens of a chunk, V vocabulary rows, K tokens of the teacher, E = K or K + 1 outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.sharding.manual import active, on_shards
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import TOKENS, Axes

IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Arrays of a batch: ids int32 [B, T, K]; log-probabilities float32 [B, T, K + 1] (the last one is that of all other tokens) or [B, T, K]
(`renormalize`)."""
METRICS = "distillation/"
"""Prefix of the metrics."""
_LEAST = float(jnp.finfo(jnp.float32).min)


class Teacher(NamedTuple):
    """The teacher's tokens and log-probabilities, with the same leading dims."""

    ids: jax.Array
    log_probs: jax.Array

    @classmethod
    def of(cls, rows: Mapping[str, jax.Array]) -> Teacher | None:
        """Return the teacher's arrays of a batch; None where it has none."""
        return cls(rows[IDS], rows[LOG_PROBS]) if IDS in rows else None


def divergence(
    partitioner: Partitioner, temperature: float, logits_RBCV: jax.Array, lse_RBC: jax.Array, teacher: Teacher
) -> tuple[jax.Array, jax.Array]:
    """Return KL(teacher || student) of each token [R, B, C], and the gradient of T^2 KL in the logits [R, B, C, V], float32.

    Args:
      partitioner: of the mesh.
      temperature: T.
      logits_RBCV: of the student, float32, sharded along `act_vocab`; the most negative float where there is no token.
      lse_RBC: their log-sum-exp.
      teacher: arrays [R, B, C, ...]; the probabilities are normalized here, as rounding to 16 bits changes their sum.
    """
    scaled_RBCV = logits_RBCV / temperature
    log_p_RBCE = jax.nn.log_softmax(teacher.log_probs)
    p_RBCE = jnp.exp(log_p_RBCE)
    log_q_RBCE = take_tokens(partitioner, scaled_RBCV, teacher.ids)
    with_rest = teacher.log_probs.shape[-1] > teacher.ids.shape[-1]
    if with_rest:
        lse_RBC = lse_RBC if temperature == 1 else _log_sum_exp(scaled_RBCV)
        listed_RBCV = listed(partitioner, teacher.ids, logits_RBCV.shape[-1])
        rest_RBC = _log_sum_exp(jnp.where(listed_RBCV, _LEAST, scaled_RBCV))
        log_q_RBCE = jnp.concatenate([log_q_RBCE, rest_RBC[..., None]], axis=-1) - lse_RBC[..., None]
        q_RBCV = jnp.exp(scaled_RBCV - lse_RBC[..., None])
        # the teacher's other tokens, spread as the student's; exp(scaled - rest) is at most 1 there
        others_RBCV = p_RBCE[..., -1:] * jnp.exp(jnp.where(listed_RBCV, _LEAST, scaled_RBCV) - rest_RBC[..., None])
        slope_RBCV = q_RBCV - jnp.where(listed_RBCV, 0, others_RBCV)
        change_RBCK = -p_RBCE[..., :-1]
    else:
        log_q_RBCE = jax.nn.log_softmax(log_q_RBCE)
        slope_RBCV = jnp.zeros_like(scaled_RBCV)
        change_RBCK = jnp.exp(log_q_RBCE) - p_RBCE
    kl_RBC = jnp.sum(jnp.where(p_RBCE > 0, p_RBCE * (log_p_RBCE - log_q_RBCE), 0), axis=-1)
    return kl_RBC, temperature * add_to_tokens(partitioner, slope_RBCV, teacher.ids, change_RBCK)


def top_tokens(partitioner: Partitioner, temperature: float, logits_RBCV: jax.Array, count: int) -> Teacher:
    """Return the `count` most likely tokens, most likely first, with their log-probabilities and that of all others [R, B, C, count + 1].

    logits as in `divergence`.
    """
    scaled_RBCV = logits_RBCV / temperature
    vocab = _vocab_axes(partitioner)

    def local(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
        if vocab:
            ids += jax.lax.axis_index(vocab) * logits.shape[-1]
            values, ids = (jax.lax.all_gather(x, vocab, axis=3, tiled=True) for x in (values, ids))
            values, places = jax.lax.top_k(values, count)
            ids = jnp.take_along_axis(ids, places, axis=-1)
        return values, ids

    whole = _spec(partitioner, None)
    values_RBCK, ids_RBCK = _on_shards(partitioner, local, (_spec(partitioner, "act_vocab"),), (whole, whole))(scaled_RBCV)
    rest_RBC = _log_sum_exp(jnp.where(listed(partitioner, ids_RBCK, logits_RBCV.shape[-1]), _LEAST, scaled_RBCV))
    values_RBCE = jnp.concatenate([values_RBCK, rest_RBC[..., None]], axis=-1)
    return Teacher(ids_RBCK, values_RBCE - _log_sum_exp(scaled_RBCV)[..., None])


def take_tokens(partitioner: Partitioner, logits_RBCV: jax.Array, ids_RBCK: jax.Array) -> jax.Array:
    """Return the logits of ids, [R, B, C, K]. Indexing along a sharded dim would all-gather the logits: each device takes those it has."""
    vocab = _vocab_axes(partitioner)

    def local(logits: jax.Array, ids: jax.Array) -> jax.Array:
        place, mine = _places(vocab, logits.shape[-1], ids)
        found = jnp.take_along_axis(logits, jnp.where(mine, place, 0), axis=-1)
        return jax.lax.psum(jnp.where(mine, found, 0), vocab) if vocab else found

    specs = (_spec(partitioner, "act_vocab"), _spec(partitioner, None))
    found_RBCK: jax.Array = _on_shards(partitioner, local, specs, _spec(partitioner, None))(logits_RBCV, ids_RBCK)
    return found_RBCK


def add_to_tokens(partitioner: Partitioner, values_RBCV: jax.Array, ids_RBCK: jax.Array, change_RBCK: jax.Array) -> jax.Array:
    """Return values [R, B, C, V] with `change` added at ids. It communicates nothing."""

    def local(values: jax.Array, ids: jax.Array, change: jax.Array) -> jax.Array:
        return _at(_vocab_axes(partitioner), values, ids).add(change, mode="drop", unique_indices=True)

    of_vocab, whole = _spec(partitioner, "act_vocab"), _spec(partitioner, None)
    added_RBCV: jax.Array = _on_shards(partitioner, local, (of_vocab, whole, whole), of_vocab)(values_RBCV, ids_RBCK, change_RBCK)
    return added_RBCV


def listed(partitioner: Partitioner, ids_RBCK: jax.Array, rows: int) -> jax.Array:
    """Return whether each of `rows` vocabulary rows is among the ids, bool [R, B, C, rows], sharded as logits."""
    shard = rows // partitioner.axis_size("act_vocab")

    def local(ids: jax.Array) -> jax.Array:
        none = jnp.zeros((*ids.shape[:-1], shard), bool)
        return _at(_vocab_axes(partitioner), none, ids).set(True, mode="drop", unique_indices=True)

    found_RBCV: jax.Array = _on_shards(partitioner, local, (_spec(partitioner, None),), _spec(partitioner, "act_vocab"))(ids_RBCK)
    return found_RBCV


def _log_sum_exp(logits_RBCV: jax.Array) -> jax.Array:
    top = jnp.max(logits_RBCV, axis=-1)
    return top + jnp.log(jnp.sum(jnp.exp(logits_RBCV - top[..., None]), axis=-1))


def _vocab_axes(partitioner: Partitioner) -> Axes:
    return active(partitioner, partitioner.rules.mesh_axes("act_vocab"))


def _spec(partitioner: Partitioner, last: str | None) -> PartitionSpec:
    return partitioner.spec((TOKENS, None, None, last))


def _on_shards(partitioner: Partitioner, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return fn if partitioner.mesh.size == 1 else on_shards(partitioner, fn, in_specs, out_specs)


def _places(vocab: Axes, rows: int, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the places of ids in this device's `rows` rows of the vocabulary, and whether they are there."""
    place = ids - (jax.lax.axis_index(vocab) * rows if vocab else 0)
    return place, (place >= 0) & (place < rows)


def _at(vocab: Axes, values: jax.Array, ids: jax.Array) -> Any:
    """Return `values.at` the local places of ids; those of other devices are dropped."""
    place, mine = _places(vocab, values.shape[-1], ids)
    outside = values.shape[-1] + jnp.arange(ids.shape[-1])  # past the end, each once
    r, b, c = jnp.ix_(*(jnp.arange(size) for size in ids.shape[:-1]))
    return values.at[r[..., None], b[..., None], c[..., None], jnp.where(mine, place, outside)]
