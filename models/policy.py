"""Loss of policy updates on rollouts (GRPO), and its gradient by one forward pass of the model.

A rollout is a prompt, a sampled completion and its reward. With the log-probability s of a completion's token by the model, s_old by the
model that sampled it, s_reference by the model before training, the advantage A of the rollout, e_low and e_high = policy.clip_low and
clip_high, and k = policy.kl, the loss of a token is

    -min(r A, clip(r, 1 - e_low, 1 + e_high) A) + k (exp(s_reference - s) - (s_reference - s) - 1),   r = exp(s - s_old)

(Shao et al., DeepSeekMath, arXiv 2402.03300, equations 3 and 4; separate bounds: Yu et al., DAPO, arXiv 2503.14476, equation 10; with
policy.unbiased_kl the last term is multiplied by r: DeepSeek-V3.2, arXiv 2512.02556). The loss of a batch is the sum over tokens of
share * loss. The shares (`token_shares`) are the difference between the losses:

    grpo      1 / (N n)   N rollouts, n tokens in the completion: mean over rollouts of the mean over tokens (arXiv 2402.03300)
    dr_grpo   1 / (N m)   m = policy.max_completion: no preference for long wrong or short right completions (arXiv 2503.20783)
    dapo      1 / sum n   mean over all tokens (arXiv 2503.14476)

Legend: B rows (a rollout each), T tokens per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.models.loss import loss_of, token_log_probs

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.configs.tuning_schema import PolicyConfig
    from ridgeline.models.decoder import Decoder
    from ridgeline.sharding.partition import Partitioner

ADVANTAGES, OLD, REFERENCE = "advantages", "old_log_probs", "reference_log_probs"
"""Names of the arrays of a batch of rollouts beside those of text, float32 [B, T]; the last only with policy.kl. `weights` are shares."""
METRICS = "policy/"
"""Prefix of the metrics of a policy update."""
EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


class PolicySums(NamedTuple):
    """Sums over the tokens of a batch that count, float32 scalars."""

    loss: jax.Array
    """Weighted by the shares; the others are not."""
    kl: jax.Array
    """Estimate of the divergence from the reference; 0 without policy.kl."""
    clipped_low: jax.Array
    """Tokens with A < 0 and r < 1 - clip_low: they have no gradient but that of the divergence."""
    clipped_high: jax.Array
    """Tokens with A > 0 and r > 1 + clip_high."""
    ratio: jax.Array
    """r."""

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names in `means`."""
        return ("loss", *(f"{METRICS}{name}" for name in PolicySums._fields[1:]))

    def means(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return name -> mean over `tokens`; the loss as it is."""
        values = (self.loss, *(value / tokens for value in self[1:]))
        return dict(zip(self.names(), values, strict=True))


def count_tokens(weights_BT: jax.Array) -> jax.Array:
    """Return the number of tokens that count, float32 scalar."""
    return jnp.sum(weights_BT > 0, dtype=jnp.float32)


def advantages(rewards_N: np.ndarray, groups_N: np.ndarray, scale: str) -> np.ndarray:
    """Return rewards minus the mean of their group, float32 [N], over the standard deviation (n - 1) of the group, the batch, or neither.

    groups: id of the group of each rollout. scale: policy.scale_rewards. A group of one rollout has the deviation 0.
    """
    rewards_N = np.asarray(rewards_N, np.float64)
    _, index_N = np.unique(groups_N, return_inverse=True)
    sizes = np.bincount(index_N)
    centered_N = rewards_N - (np.bincount(index_N, rewards_N) / sizes)[index_N]
    if scale == "group":
        deviation_N = np.sqrt(np.bincount(index_N, centered_N**2) / np.maximum(sizes - 1, 1))[index_N]
        centered_N = centered_N / (deviation_N + EPSILON)
    elif scale == "batch":
        centered_N = centered_N / ((np.std(rewards_N, ddof=1) if len(rewards_N) > 1 else 0.0) + EPSILON)
    return centered_N.astype(np.float32)


def token_shares(policy: PolicyConfig, mask_BT: np.ndarray) -> np.ndarray:
    """Return the share of each token in the loss of its batch, float32 [B, T]. mask: tokens of completions; a row without is padding."""
    mask_BT = mask_BT.astype(np.float64)
    counts_B1 = mask_BT.sum(axis=1, keepdims=True)
    rollouts = max(1, int(np.count_nonzero(counts_B1)))
    divisor: Any
    if policy.loss == "grpo":
        divisor = rollouts * np.maximum(counts_B1, 1)
    elif policy.loss == "dr_grpo":
        assert policy.max_completion is not None  # configs/tuning_rules.py
        divisor = rollouts * policy.max_completion
    else:
        assert policy.loss == "dapo", policy.loss
        divisor = max(1.0, counts_B1.sum())
    return (mask_BT / divisor).astype(np.float32)


def policy_of(
    model: Decoder, config: Config, partitioner: Partitioner, x_BTD: jax.Array, rows: Mapping[str, jax.Array], *, frozen: bool = False
) -> tuple[jax.Array, PolicySums]:
    """Return a scalar with the gradient of the loss of the rollouts of `rows`, and the sums. The value of the scalar has no meaning.

    x, `rows` and `frozen` as in `models.loss.loss_of`, with the arrays of rollouts. As in `models.preference.preference_of`, the slope of
    the loss in the log-probability of each token comes first, and weights the cross-entropy.
    """
    log_prob_BT = token_log_probs(model, config, partitioner, x_BTD, rows)
    weights_BT = rows["weights"]

    def summed(log_prob_BT: jax.Array) -> tuple[jax.Array, PolicySums]:
        sums = policy_sums(config.policy, log_prob_BT, rows)
        return sums.loss, sums

    slope_BT, sums = jax.grad(summed, has_aux=True)(log_prob_BT)
    slope_BT = jnp.where(weights_BT > 0, slope_BT, 0.0)
    weighted = loss_of(model, config, partitioner, x_BTD, {**rows, "weights": -slope_BT}, frozen=frozen)
    return weighted.nats, sums


def policy_sums(policy: PolicyConfig, log_prob_BT: jax.Array, rows: Mapping[str, jax.Array]) -> PolicySums:
    """Return the sums of a batch (formulas: module docstring). log_prob: of the targets."""
    weights_BT, advantages_BT = rows["weights"], rows[ADVANTAGES]
    counts_BT = weights_BT > 0
    log_prob_BT = jnp.where(counts_BT, log_prob_BT, 0.0)
    low, high = 1 - policy.clip_low, 1 + policy.clip_high
    ratio_BT = jnp.exp(log_prob_BT - jnp.where(counts_BT, rows[OLD], 0.0))
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, jnp.clip(ratio_BT, low, high) * advantages_BT)
    kl_BT = jnp.zeros_like(log_prob_BT)
    if policy.kl:
        further_BT = jnp.where(counts_BT, rows[REFERENCE], 0.0) - log_prob_BT
        kl_BT = jnp.exp(further_BT) - further_BT - 1
        if policy.unbiased_kl:
            kl_BT *= ratio_BT
        loss_BT += policy.kl * kl_BT

    def count(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counts_BT, values_BT, 0), dtype=jnp.float32)

    return PolicySums(
        loss=jnp.sum(weights_BT * loss_BT),
        kl=count(kl_BT),
        clipped_low=count((ratio_BT < low) & (advantages_BT < 0)),
        clipped_high=count((ratio_BT > high) & (advantages_BT > 0)),
        ratio=count(ratio_BT),
    )
