"""One line at the end of a run: what bound it most, or that nothing is worth changing."""

from __future__ import annotations

from pathlib import Path

from ridgeline.explain.diagnosis.facts import read_facts
from ridgeline.explain.diagnosis.finding import Finding
from ridgeline.explain.diagnosis.rules import diagnose


def last_word(run: Path) -> str:
    """Return the line. It never raises: a run does not end over its diagnosis."""
    more = f"ridge diagnose {run}"
    try:
        facts = read_facts(run)
        findings = diagnose(facts)
    except Exception as error:
        return f"diagnosis: none ({type(error).__name__}: {error}); {more}"
    if not findings:
        unseen = "" if facts.analysis is not None else "; the inside of a step was not profiled"
        return f"diagnosis: nothing worth changing (goodput {facts.ledger.goodput:.1%}{unseen}); {more}"
    others = f", {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"diagnosis: {_said(findings[0])}{others}; {more}"


def _said(finding: Finding) -> str:
    return f"{finding.rule} ({finding.gain_text}): {finding.evidence[0]}"
