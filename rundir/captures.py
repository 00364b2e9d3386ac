"""The layout of captured profiles: their directories, newest last, and the names of the files in them.

tensorboard/plugins/profile/<capture>/*.xplane.pb       one trace per process
                                     /*.frames.json     samples of the main thread (observe/frames.py)
                                     /*.hlo.txt         the profiled program
                                     /capture.json      steps, devices, program (observe/profiler.py)
                                     /analysis.json     result of `ridge analyze` (explain/trace/publish.py)
"""

from __future__ import annotations

from pathlib import Path

TRACE_SUFFIX = ".xplane.pb"
FRAMES_SUFFIX = ".frames.json"
CAPTURE_FILE = "capture.json"
ANALYSIS_FILE = "analysis.json"


_IN_LOGS = ("plugins", "profile")


def log_directory(run_dir: Path) -> Path:
    """Return TensorBoard's log directory of a run. The user may have made it a link."""
    return run_dir / "tensorboard"


def profile_root(run_dir: Path) -> Path:
    """Return the directory of the captures of a run."""
    return log_directory(run_dir).joinpath(*_IN_LOGS)


def written_below(capture: Path) -> Path:
    """Return the directory below which a capture must not be behind a link: TensorBoard's log directory where it is in one."""
    above = capture.parent
    return above.parent.parent if above.parts[-2:] == _IN_LOGS else above


def trace_files(directory: Path) -> tuple[Path, ...]:
    """Return the traces in the directory of a capture, one per process."""
    return tuple(sorted(directory.glob("*" + TRACE_SUFFIX)))


def captures(directory: Path) -> list[Path]:
    """Return the directories of the captures of a run, a TensorBoard log directory or a profile directory, oldest first."""
    roots = [directory, directory / "plugins" / "profile", profile_root(directory)]
    found = {d for root in roots if root.is_dir() for d in root.iterdir() if d.is_dir() and trace_files(d)}
    return sorted(found, key=lambda d: (max(t.stat().st_mtime for t in trace_files(d)), d.name))


def newest_analysis(run_dir: Path) -> Path | None:
    """Return the newest analysis.json of the captures of a run; None when no capture was analyzed."""
    files = sorted(profile_root(run_dir).glob(f"*/{ANALYSIS_FILE}"), key=lambda path: path.stat().st_mtime)
    return files[-1] if files else None
