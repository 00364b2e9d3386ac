"""Where captured profiles lie in a run directory, and the names of their files."""

from __future__ import annotations

from pathlib import Path

TRACE_SUFFIX = ".xplane.pb"
ANALYSIS_FILE = "analysis.json"
FRAMES_SUFFIX = ".frames.json"


def profile_root(run_dir: Path) -> Path:
    """Name the directory that holds the captures of a run."""
    return run_dir / "tensorboard" / "plugins" / "profile"
