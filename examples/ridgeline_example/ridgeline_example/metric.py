"""The training loss in bits."""

import math

from ridgeline.rundir.metrics import DerivedMetric

BITS = DerivedMetric(
    "bits/token",
    "train/loss in bits.",
    lambda metrics: metrics["train/loss"] / math.log(2) if "train/loss" in metrics else None,
)
