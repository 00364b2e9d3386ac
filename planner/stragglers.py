"""What a synchronous step loses to the slowest of its devices.

Devices of one model differ: in the silicon, the clock that their power limit allows and their temperature. Every collective waits for the
slowest, so a step takes the time of the largest of n draws. Of a normal distribution it is expected about z((n - 3/8) / (n + 1/4))
standard deviations above the mean, z the quantile function (G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958): 1.4 for
8 devices, 3.0 for 512.
"""

from __future__ import annotations

from statistics import NormalDist

SPREAD = 0.015
"""Standard deviation of the time of one computation between devices of one model, over its mean: P. Sinha et al., Not All GPUs Are Created
Equal, SC22 (arXiv 2208.11035), measured a variation of 8 % on average in five systems. Taken as the range between the whiskers of a box
plot, which for a normal spread are 5.4 standard deviations apart."""


def slowest_over_mean(devices: int) -> float:
    """Return the expected time of the slowest of this many devices over the mean: 1 for one device."""
    return 1 + SPREAD * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
