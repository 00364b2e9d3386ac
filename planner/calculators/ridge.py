"""Ridge points: from which intensity, batch or axis size on computing takes longer than moving.

    roofline        intensity C/W in FLOP per byte; above it a kernel is bound by compute
    data, FSDP      tokens per device > C/W * (X-1)/X [* E/k]       parameters of 2 bytes over X devices; k of E experts active
    tensor          devices < F * W/C                               activations of 2 bytes, F the MLP width
    data x tensor   tokens per device > 4 * (C/W)^2 / (M_X * M_Y * F)   M: links per axis that a device can use at once
W is of ONE direction. Source: JAX scaling book, chapters Training and GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.planner.checks import count, positive

AXES = ("data", "tensor", "data-tensor")


@dataclass(frozen=True)
class RidgeEstimate:
    """Where computing and moving balance."""

    intensity: float
    """C / W, FLOP per byte."""
    threshold: float
    meaning: str
    """What the threshold is of, and which side of it is bound by compute."""


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
      mlp_width: F, needed with a tensor axis.
      devices: X of a data axis, for the factor (X-1)/X; None: the limit of many.
      experts, active_experts: of a mixture of experts, for a data axis.
      links_per_axis: M_X, M_Y of data-tensor.

    Raises UserError: values that are not positive, a missing width, more active experts than experts.
    """
    ratio = positive("peak-flops", peak_flops) / positive("bandwidth", bandwidth)
    if axis is not None and axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    if axis in ("tensor", "data-tensor") and mlp_width is None:
        raise UserError(f"axis {axis}: needs mlp-width, the hidden width of the MLP")
    if axis is None:
        return RidgeEstimate(ratio, ratio, "FLOP per byte above which a kernel is bound by compute")
    if axis == "data":
        many = 1.0 if devices is None else (count("devices", devices) - 1) / devices
        e, k = count("experts", experts), count("active-experts", active_experts)
        if k > e:
            raise UserError(f"active-experts={k}: at most experts={e}")
        return RidgeEstimate(ratio, ratio * many * e / k, "tokens per device above which data parallelism or FSDP is bound by compute")
    assert mlp_width is not None
    width = positive("mlp-width", mlp_width)
    if axis == "tensor":
        return RidgeEstimate(ratio, width / ratio, "devices along the tensor axis below which it is bound by compute")
    m_x, m_y = (positive("links", links) for links in links_per_axis)
    return RidgeEstimate(
        ratio, 4 * ratio**2 / (m_x * m_y * width), "tokens per device above which data x tensor parallelism is bound by compute"
    )
