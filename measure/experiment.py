"""Write an experiment as a Markdown section: hypothesis, predicted effect, change, measured effect, decision.

Write the first two before measuring. Two stored results fill in the change and the measured effect.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural
from ridgeline.measure.ladder import ms
from ridgeline.measure.regression import UNIMPORTANT, Judgment

BLANK = {
    "hypothesis": "_The bottleneck and its evidence: which layer of the ladder, which measurement._",
    "predicted": "_Which layer changes, by how much, and the upper limit. Written before measuring._",
    "change": "_One thing: the commit or the override._",
    "measured": "_`ridge bench compare BASELINE NEW`: faster, slower or cannot tell, with the interval._",
    "decision": "_Kept, dropped, or measured again because ...; the next bottleneck._",
}


def experiment(title: str, when: date, *, judgment: Judgment | None = None, **texts: str | None) -> str:
    """Return the section. `texts`: hypothesis, predicted, change and decision; a missing text becomes a placeholder."""
    assert texts.keys() <= BLANK.keys()
    given = {key: text for key, text in texts.items() if text}
    change = given.get("change") or (_change(judgment) if judgment else BLANK["change"])
    return "\n".join(
        [
            f"### {when.isoformat()} {title}",
            f"* **Hypothesis.** {given.get('hypothesis', BLANK['hypothesis'])}",
            f"* **Predicted effect.** {given.get('predicted', BLANK['predicted'])}",
            f"* **Change.** {change}",
            f"* **Measured effect.** {_measured(judgment) if judgment else BLANK['measured']}",
            f"* **Decision.** {given.get('decision', BLANK['decision'])}",
            "",
        ]
    )


def append(path: Path, section: str) -> None:
    """Append a section to a file, which is created if needed. Raises UserError when it cannot be written."""
    try:
        with path.open("a") as file:
            file.write(("\n" if file.tell() else "") + section)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _change(judgment: Judgment) -> str:
    old, new = judgment.old[-1], judgment.new[-1]
    parts = [f"code {old.code} -> {new.code}"] if old.code != new.code else []
    parts += [f"`{key}` {a} -> {b}" for key, a, b in diff(old.config, new.config) if key not in UNIMPORTANT]
    return "; ".join(parts) or "none: two measurements of the same code and config"


def _measured(judgment: Judgment) -> str:
    device, runs = judgment.new[-1].provenance["device"], (len(judgment.old), len(judgment.new))
    measured = f"{device['count']} x {device['kind']}, {runs[0]} and {plural(runs[1], 'run')}"
    head = f"{judgment.headline()} (`ridge bench {judgment.task}`, {measured})."
    rows = ["", "  | layer | before | after | verdict |", "  |---|---|---|---|"]
    rows += [f"  | {v.layer} | {ms(v.old_s)} | {ms(v.new_s)} | {v.comparison.describe()} |" for v in judgment.layers]
    notes = [f"  {note}." for note in judgment.notes]
    return "\n".join([head, *rows, *(["", *notes] if notes else [])])
