"""Charts of a scaling-law ladder: loss over compute with the law and its predictions, and the errors of the fit."""

from __future__ import annotations

from ridgeline.explain.report.study_charts import LAW_POINTS, Curve, chart
from ridgeline.explain.study.document import LadderStudy


def ladder_charts(ladder: LadderStudy) -> dict[str, str]:
    """Draw the charts of a ladder; name -> SVG."""
    ran = [row for row in ladder["rows"] if row["failure"] is None]
    law, check, target = ladder["law"], ladder["check"], ladder["target"]
    first, last = ran[0]["flops"], max(ran[-1]["flops"], target["flops"])

    def fitted(flops: float) -> float:
        return law["irreducible"] + law["amplitude"] * (flops / law["flops_scale"]) ** -law["alpha"]

    grid = [first * (last / first) ** (i / LAW_POINTS) for i in range(LAW_POINTS + 1)]
    bars = [(row["flops"], min(row["losses"]), max(row["losses"])) for row in ran if len(row["losses"]) > 1]
    curves = [
        Curve("measured", [(row["flops"], row["loss"]) for row in ran], bars=bars, line=False),
        Curve("law", [(flops, fitted(flops)) for flops in grid], dashed=True, dots=False),
        Curve("target", [(target["flops"], target["loss"])], bars=[(target["flops"], target["low"], target["high"])]),
    ]
    if check is not None:
        curves.append(
            Curve("largest from smaller", [(check["flops"], check["loss"])], bars=[(check["flops"], check["low"], check["high"])])
        )
    errors = [(row["flops"], 100 * (loss / fitted(row["flops"]) - 1)) for row in ran for loss in row["losses"]]
    flat = Curve("law", [(flops, 0.0) for flops in (first, ran[-1]["flops"])], dashed=True, dots=False)
    return {
        "loss": chart("Loss over compute", "nats per token", curves, x_label="FLOP of the run", x_format="{:.1e}"),
        "fit": chart("Measured less fitted", "%", [Curve("runs", errors, line=False), flat], x_label="FLOP of the run", x_format="{:.1e}"),
    }
