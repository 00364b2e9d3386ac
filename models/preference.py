"""Losses of preference pairs, and their gradient by one forward pass of the model.

Rows 2k and 2k + 1 of a batch are the chosen and the rejected conversation of pair k. With the log-probabilities s of both sides and those
of the reference (the model before training), r = s - s_reference, d = r_chosen - r_rejected, b = preference.beta, e = label_smoothing:

    dpo     -(1 - e) log sigmoid(b d) - e log sigmoid(-b d)                     Rafailov et al., arXiv 2305.18290, equation 7; e: appendix A
                                                                                of Mitchell, "A note on DPO with noisy preferences", 2023
    robust  (-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)) / (1 - 2 e)       Chowdhury et al., arXiv 2403.00409, equation 12
    hinge   max(0, 1 - b d)                                                     Zhao et al., SLiC-HF, arXiv 2305.10425, with a reference
    ipo     (r_chosen / n_chosen - r_rejected / n_rejected - 1 / (2 b))^2       Azar et al., arXiv 2310.12036, equation 17, of means over
                                                                                the n counted tokens of a side

Legend: B rows, P = B / 2 pairs, T tokens per row, D embed width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ridgeline.models.loss import loss_of, row_log_probs

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.configs.tuning_schema import PreferenceConfig
    from ridgeline.models.decoder import Decoder
    from ridgeline.sharding.partition import Partitioner

REFERENCE = "reference"
"""Name of the log-probabilities of the reference in a batch, float32 [B, 1]. A batch has it if its rows are pairs."""


METRICS = "preference/"
"""Prefix of the metrics of a step about pairs."""


class PreferenceSums(NamedTuple):
    """Sums over the pairs of a batch, float32 scalars. Rows without targets are no pair: they count nowhere."""

    loss: jax.Array
    accuracy: jax.Array
    """Pairs whose chosen side has the larger reward."""
    chosen_reward: jax.Array
    """b (s - s_reference) of the chosen side."""
    rejected_reward: jax.Array
    chosen_log_prob: jax.Array
    """s of the chosen side: sum over its counted tokens."""
    rejected_log_prob: jax.Array

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names in `means`."""
        return ("loss", *(f"{METRICS}{name}" for name in (*PreferenceSums._fields[1:], "margin")))

    def means(self, pairs: jax.Array) -> dict[str, jax.Array]:
        """Return name -> mean over `pairs`. The margin is the difference of both rewards."""
        values = (*self, self.chosen_reward - self.rejected_reward)
        return {name: value / pairs for name, value in zip(self.names(), values, strict=True)}


def count_pairs(weights_BT: jax.Array) -> jax.Array:
    """Return the number of pairs with targets, float32 scalar."""
    return jnp.sum(_exists(jnp.sum(weights_BT, axis=1)))


def _exists(counts_B: jax.Array) -> jax.Array:
    """Return 1 for each pair with targets and 0 for padding, float32 [P]. counts: weights of a row."""
    return jnp.any(counts_B.reshape(-1, 2) > 0, axis=1).astype(jnp.float32)


def preference_of(
    model: Decoder, config: Config, partitioner: Partitioner, x_BTD: jax.Array, rows: Mapping[str, jax.Array], *, frozen: bool = False
) -> tuple[jax.Array, PreferenceSums]:
    """Return a scalar with the gradient of the summed loss of the pairs of `rows`, and the sums. The value of the scalar has no meaning.

    x, `rows` (targets, weights [B, T], reference [B, 1]) and `frozen` as in `models.loss.loss_of`.

    The loss depends on the parameters through s alone: its gradient is the sum over rows of (d loss / d s) grad s, and s is minus the
    cross-entropy of a row. So d loss / d s is computed first, in a pass of the unembedding without gradient, and the cross-entropy
    weighted by its negative then has the gradient of the loss.
    """
    log_prob_B = row_log_probs(model, config, partitioner, x_BTD, rows)
    counts_B, reference_B = jnp.sum(rows["weights"], axis=1), rows[REFERENCE][:, 0]
    exists_P = _exists(counts_B)

    def summed(log_prob_B: jax.Array) -> jax.Array:
        return jnp.sum(exists_P * pair_losses(config.preference, log_prob_B, reference_B, counts_B))

    loss, slope_B = jax.value_and_grad(summed)(log_prob_B)
    weights_BT = rows["weights"] * -slope_B[:, None]
    weighted = loss_of(model, config, partitioner, x_BTD, {**rows, "weights": weights_BT}, frozen=frozen)
    return weighted.nats, _sums(config.preference, loss, exists_P, log_prob_B, reference_B)


def pair_losses(preference: PreferenceConfig, log_prob_B: jax.Array, reference_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Return the loss of each pair, float32 [P] (formulas: module docstring).

    log_prob, reference: sums over the counted tokens of a row; counts: number of those.
    """
    beta, smoothing = preference.beta, preference.label_smoothing
    ratio_B = log_prob_B - reference_B
    if preference.loss == "ipo":
        delta_P = _difference(ratio_B / jnp.maximum(counts_B, 1))
        return jnp.square(delta_P - 1 / (2 * beta))
    margin_P = beta * _difference(ratio_B)
    if preference.loss == "hinge":
        return jax.nn.relu(1 - margin_P)
    right_P, wrong_P = jax.nn.softplus(-margin_P), jax.nn.softplus(margin_P)  # -log sigmoid
    if preference.loss == "robust":
        return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
    assert preference.loss == "dpo", preference.loss
    return (1 - smoothing) * right_P + smoothing * wrong_P


def _difference(values_B: jax.Array) -> jax.Array:
    """Return chosen minus rejected, [P]."""
    pairs_P2 = values_B.reshape(-1, 2)
    return pairs_P2[:, 0] - pairs_P2[:, 1]


def _sums(
    preference: PreferenceConfig, loss: jax.Array, exists_P: jax.Array, log_prob_B: jax.Array, reference_B: jax.Array
) -> PreferenceSums:
    log_prob_P2, reward_P2 = log_prob_B.reshape(-1, 2), preference.beta * (log_prob_B - reference_B).reshape(-1, 2)
    right = jnp.sum(exists_P * (reward_P2[:, 0] > reward_P2[:, 1]))
    return PreferenceSums(loss, right, *(jnp.sum(exists_P * values[:, side]) for values in (reward_P2, log_prob_P2) for side in (0, 1)))
