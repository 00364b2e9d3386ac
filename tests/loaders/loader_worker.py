"""One of several loading processes: prints a digest of each of its rows for tests/loaders/test_loader.py.

For each number of processes that it is one of, it builds a loader for its share and prints lines `processes step row sha256`:
python loader_worker.py '{"data": ..., "process": 0, "counts": [1, 2], "start_step": 0, "steps": 3}'
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from ridgeline.configs.schema import DataConfig
from ridgeline.loaders.loader import build_loader


def row_digests(data: DataConfig, rows: np.ndarray, start_step: int, steps: int, vocab_size: int = 50) -> dict[tuple[int, int], str]:
    """(step, global row) -> sha256 over the five arrays of the row."""
    loader = build_loader(data, seed=11, vocab_size=vocab_size, rows=rows, start_step=start_step)
    digests = {}
    for step in range(start_step, start_step + steps):
        batch = next(loader)
        for place, row in enumerate(rows):
            content = b"".join(batch[name][place].tobytes() for name in sorted(batch))
            digests[step, int(row)] = hashlib.sha256(content).hexdigest()
    loader.close()
    return digests


def main() -> None:
    task = json.loads(sys.argv[1])
    data = DataConfig(**task["data"])
    for count in task["counts"]:
        if task["process"] < count:
            rows = np.array_split(np.arange(data.batch_size), count)[task["process"]]
            for (step, row), digest in row_digests(data, rows, task["start_step"], task["steps"]).items():
                print(count, step, row, digest)


if __name__ == "__main__":
    main()
