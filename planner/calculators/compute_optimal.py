"""The model size and tokens that a budget buys at the least loss.

    C = device_hours * 3600 * peak * MFU                          FLOP of the run
    C = 6 * N * D                                                 N parameters, D tokens (Kaplan et al., arXiv 2001.08361, section 2.1)
    loss(N, D) = E + A / N^alpha + B / D^beta                     nats per token
    N* = G * (C/6)^(beta / (alpha + beta)),  G = (alpha * A / (beta * B))^(1 / (alpha + beta)),  D* = C / (6 * N*)

Sources: the form and its minimum, Hoffmann et al., arXiv 2203.15556, section 3.3 and appendix D.3; the constants, Besiroglu et al.,
arXiv 2404.10102, equation 3, a fit to the same runs whose residuals are small (the published constants contradict the paper's own other
two estimates). They hold for its data and models of 44M to 16B parameters; elsewhere they are an extrapolation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.calculators.checks import positive, share

ENTROPY, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
FLOPS_PER_PARAMETER_AND_TOKEN = 6
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Purchase:
    """A model and its tokens for one budget."""

    flops: float
    """FLOP of the run."""
    params: float
    """Active parameters."""
    tokens: float
    loss: float
    """Predicted training loss, nats per token."""
    optimal_params: float
    optimal_tokens: float
    optimal_loss: float

    @property
    def tokens_per_param(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.params

    @property
    def extra_compute(self) -> float:
        """Compute beyond that of the optimal model with the same loss, as a share of it."""
        return self.flops / _compute_for(self.loss) - 1


def budget_flops(*, device_hours: float, peak_flops: float, mfu: float) -> float:
    """Return the FLOP of a run.

    Args:
      peak_flops: dense datasheet peak of one device, FLOP/s.
      mfu: model FLOPs over the peak, in (0, 1].
    """
    return positive("device-hours", device_hours) * SECONDS_PER_HOUR * positive("peak-flops", peak_flops) * share("mfu", mfu)


def purchase(flops: float, params: float | None = None) -> Purchase:
    """Return the model and tokens of least loss for a number of FLOP, or the tokens for a given model.

    Raises UserError for values that are not positive.
    """
    positive("flops", flops)
    best = _optimal_params(flops)
    chosen = best if params is None else positive("params", params)
    tokens, best_tokens = (flops / FLOPS_PER_PARAMETER_AND_TOKEN / size for size in (chosen, best))
    return Purchase(flops, chosen, tokens, loss(chosen, tokens), best, best_tokens, loss(best, best_tokens))


def loss(params: float, tokens: float) -> float:
    """Return the predicted training loss, nats per token."""
    return ENTROPY + A / params**ALPHA + B / tokens**BETA


def _optimal_params(flops: float) -> float:
    scale = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    return float(scale * (flops / FLOPS_PER_PARAMETER_AND_TOKEN) ** (BETA / (ALPHA + BETA)))


def _compute_for(wanted: float) -> float:
    """Return the FLOP with which the optimal model reaches a loss: its excess over ENTROPY is a power of the FLOP."""
    at = 1e21
    best = _optimal_params(at)
    excess = loss(best, at / FLOPS_PER_PARAMETER_AND_TOKEN / best) - ENTROPY
    return float(at * ((wanted - ENTROPY) / excess) ** (-(ALPHA + BETA) / (ALPHA * BETA)))
