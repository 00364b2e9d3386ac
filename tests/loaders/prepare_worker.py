"""A whole preparation in its own process: python prepare_worker.py INPUT OUTPUT WORKERS SHARDS [SLICE_INDEX SLICE_COUNT]."""

from __future__ import annotations

import sys
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.loaders.prepare import PrepareSettings, Slice, prepare
from ridgeline.loaders.records import parse_holdouts


def main() -> None:
    source, output, workers, shards, *part = sys.argv[1:]
    settings = PrepareSettings(
        (Path(source),), Path(output), "bytes", shards=int(shards), holdouts=parse_holdouts(["validation=0.1"]), gzip_baseline=True
    )
    try:
        summary = prepare(settings, workers=int(workers), slice=Slice(*map(int, part)) if part else None)
    except UserError as error:
        sys.exit(f"refused: {error}")
    print(summary.kept_shards, summary.made_shards)


if __name__ == "__main__":
    main()
