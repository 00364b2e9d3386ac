"""The log-probability of given tokens, for each row of a batch.

Legend: B batch, T tokens of a row (a multiple of C), C tokens whose logits are computed at a time, D embed width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline.models.decoder import Decoder

CHUNK = 64


class Score(NamedTuple):
    """The score of the last tokens of a row."""

    nats: float
    """Their summed log-probability."""
    greedy: bool
    """Whether each of them is the most likely token."""


def score(
    decoder: Decoder, rows: Sequence[tuple[Sequence[int], int]], batch_size: int, on_batch: Callable[[], object] = lambda: None
) -> list[Score]:
    """Return the score of the last `count` tokens of each (ids, count), given those before them; `batch_size` rows at a time.

    Each row has more than `count` ids. Rows of similar length share a batch. on_batch: called after each. Called in every process of the
    mesh.
    """
    shards = decoder.execution.partitioner.axis_size("batch")
    size = -(-min(batch_size, max(1, len(rows))) // shards) * shards
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
    found: dict[int, Score] = {}
    graphdef, state = nnx.split(decoder)
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        length = -(-(len(rows[batch[0]][0]) - 1) // CHUNK) * CHUNK
        tokens_BT, targets_BT, weights_BT = (np.zeros((size, length), dtype) for dtype in (np.int32, np.int32, np.bool_))
        for at, row in enumerate(batch):
            ids, count = rows[row]
            tokens_BT[at, : len(ids) - 1], targets_BT[at, : len(ids) - 1] = ids[:-1], ids[1:]
            weights_BT[at, len(ids) - 1 - count : len(ids) - 1] = True
        nats_B, greedy_B = jax.device_get(score_rows(graphdef, state, tokens_BT, targets_BT, weights_BT))
        on_batch()
        found |= {row: Score(float(nats_B[at]), bool(greedy_B[at])) for at, row in enumerate(batch)}
    return [found[row] for row in range(len(rows))]


@partial(jax.jit, static_argnums=0)
def score_rows(
    graphdef: Any, state: Any, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of the log-probabilities of the targets where the weight is true, float32 [B]; whether all of these are the most likely
    tokens, bool [B]), replicated. Tokens and targets int32."""
    decoder = nnx.merge(graphdef, state)
    partitioner = decoder.execution.partitioner
    x_BTD = decoder(partitioner.constrain(tokens_BT, "batch", None))
    batch, length = tokens_BT.shape

    def chunk(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
        (nats_B, greedy_B), (x_BCD, targets_BC, weights_BC) = carry, inputs
        logits_BCV = decoder.logits(x_BCD)
        target_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], -1)[..., 0]
        of_BC = target_BC - jax.nn.logsumexp(logits_BCV, -1)
        most_BC = jnp.argmax(logits_BCV, -1) == targets_BC
        return (nats_B + jnp.sum(jnp.where(weights_BC, of_BC, 0), -1), greedy_B & jnp.all(most_BC | ~weights_BC, -1)), None

    def chunks(x_BT: jax.Array) -> jax.Array:
        return x_BT.reshape(batch, length // CHUNK, CHUNK, *x_BT.shape[2:]).swapaxes(0, 1)

    start = (jnp.zeros(batch, jnp.float32), jnp.ones(batch, bool))
    (nats_B, greedy_B), _ = jax.lax.scan(chunk, start, (chunks(x_BTD), chunks(targets_BT), chunks(weights_BT)))
    return partitioner.constrain(nats_B, None), partitioner.constrain(greedy_B, None)
