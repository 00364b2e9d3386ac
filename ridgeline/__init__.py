"""Ridgeline trains language models on GPU clusters with JAX. The packages are folders at the top of the repository, linked here.

The Python API is ridgeline/api.py: `ridgeline.load_config`, `plan`, `train`, `open_run`, `evaluate`, `generate` and more.
Importing `ridgeline` imports neither JAX nor pydantic; the first use of a function does.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.api import (
        CheckpointError,
        Config,
        Evaluation,
        Generation,
        NumericalFailure,
        Plan,
        Rollout,
        RunDir,
        TaskEvaluation,
        TrainingStopped,
        TrainResult,
        UserError,
        evaluate,
        evaluate_tasks,
        find_nan,
        generate,
        load_config,
        open_policy,
        open_run,
        plan,
        train,
        write_teacher,
    )

PACKAGE = Path(__file__).resolve().parent
"""Directory of the package `ridgeline`; its parent is what PYTHONPATH must hold, and the git working tree of a checkout."""

__all__ = [
    "PACKAGE",
    "CheckpointError",
    "Config",
    "Evaluation",
    "Generation",
    "NumericalFailure",
    "Plan",
    "Rollout",
    "RunDir",
    "TaskEvaluation",
    "TrainResult",
    "TrainingStopped",
    "UserError",
    "evaluate",
    "evaluate_tasks",
    "find_nan",
    "generate",
    "load_config",
    "open_policy",
    "open_run",
    "plan",
    "train",
    "write_teacher",
]


def __getattr__(name: str) -> Any:
    """Import the API at the first use of one of its names (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'ridgeline' has no attribute '{name}'")
    return getattr(importlib.import_module("ridgeline.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
