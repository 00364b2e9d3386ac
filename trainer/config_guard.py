"""What a resume may change: everything but what would make the checkpoint wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.errors import UserError


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the resolved config of a checkpoint with the new one (two `model_dump(mode="json")`); return a line per change.

    Raises UserError naming every change that the checkpoint does not survive (model, optimiser kind, parameter dtype).
    """
    changes = classify_changes(dict(old), dict(new))
    refused = [f"{c.key}: {c.old!r} -> {c.new!r} ({c.why})" for c in changes if not c.allowed]
    if refused:
        raise UserError(f"cannot resume with the changed config: {'; '.join(refused)}; change it back, or start a new run_dir")
    return [f"resuming with {c.key}: {c.old!r} -> {c.new!r}" + (f" ({c.why})" if c.why else "") for c in changes]


def check_tokenizer(stored: str | None, current: str | None, where: str) -> None:
    """Refuse to go on from a checkpoint that was trained with another tokenizer (both given by their sha256; None: not known)."""
    if stored and current and stored != current:
        raise UserError(f"the data's tokenizer (sha256 {current[:12]}) is not the one of {where} (sha256 {stored[:12]})")
