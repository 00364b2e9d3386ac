"""Writes the training loss to loss.csv in the run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CsvWriter:
    """A metric writer (ridgeline.observe.writers.MetricWriter)."""

    def __init__(self, run_dir: Path, *, name: str, run: str, config: Mapping[str, Any], resume_step: int | None) -> None:
        self._file = (run_dir / "loss.csv").open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/loss" in metrics:
            self._file.write(f"{step},{metrics['train/loss']}\n")

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        pass

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
