"""Ridge points: the intensity, batch or axis size above which compute takes longer than data movement.

    roofline        intensity C/W in FLOP per byte; above it a kernel is compute-bound
    data, FSDP      tokens per device > C/W * (X-1)/X [* E/k]       parameters of 2 bytes over X devices; k of E experts active
    tensor          devices < F * W/C                               activations of 2 bytes, F the MLP width
    data x tensor   tokens per device > 4 * (C/W)^2 / (M_X * M_Y * F)   M: links per axis that a device can use at once
W is the bandwidth in ONE direction. Source: JAX scaling book, chapters Training and GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.planner.calculators.checks import count, positive

AXES = ("data", "tensor", "data-tensor")


@dataclass(frozen=True)
class RidgeEstimate:
    """The point where compute and data movement take the same time."""

    intensity: float
    """C / W, FLOP per byte."""
    threshold: float
    """The ridge point of the chosen axis."""
    meaning: str
    """Quantity of the threshold, and the side on which it is compute-bound."""


def ridge_estimate(
    *,
    peak_flops: float,
    bandwidth: float,
    axis: str | None = None,
    mlp_width: float | None = None,
    devices: float | None = None,
    experts: float = 1,
    active_experts: float = 1,
    links_per_axis: tuple[float, float] = (1, 1),
) -> RidgeEstimate:
    """Return the ridge of a link or memory of `bandwidth` bytes/s in one direction against `peak_flops`.

    Args:
      axis: None for a plain roofline, or one of AXES.
      mlp_width: F, required for a tensor axis.
      devices: X of a data axis, for the factor (X-1)/X; None: the limit of large X.
      experts, active_experts: of a mixture of experts, for a data axis.
      links_per_axis: M_X, M_Y of data-tensor.

    Raises UserError for values that are not positive, a missing width, or more active experts than experts.
    """
    ratio = positive("peak-flops", peak_flops) / positive("bandwidth", bandwidth)
    if axis is not None and axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    if axis in ("tensor", "data-tensor") and mlp_width is None:
        raise UserError(f"axis {axis}: needs mlp-width, the hidden width of the MLP")
    if axis is None:
        return RidgeEstimate(ratio, ratio, "FLOP per byte above which a kernel is compute-bound")
    if axis == "data":
        many = 1.0 if devices is None else (count("devices", devices) - 1) / devices
        e, k = count("experts", experts), count("active-experts", active_experts)
        if k > e:
            raise UserError(f"active-experts={k}: at most experts={e}")
        return RidgeEstimate(ratio, ratio * many * e / k, "tokens per device above which data parallelism or FSDP is compute-bound")
    assert mlp_width is not None
    width = positive("mlp-width", mlp_width)
    if axis == "tensor":
        return RidgeEstimate(ratio, width / ratio, "devices along the tensor axis below which it is compute-bound")
    m_x, m_y = (positive("links", links) for links in links_per_axis)
    return RidgeEstimate(
        ratio, 4 * ratio**2 / (m_x * m_y * width), "tokens per device above which data x tensor parallelism is compute-bound"
    )
