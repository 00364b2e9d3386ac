"""Confusion matrix of the diagnosis: `python benchmarks/diagnosis_matrix.py DIRECTORY [--write] [RUN...]`.

Injects every fault of tests/explain/injections.py into real runs in DIRECTORY, diagnoses each run and prints the matrix as Markdown. Exit
code 1 when an expected rule is not the first finding, or a control run has a finding. Takes about three minutes of CPU time. --write also
writes docs/DIAGNOSIS.md. With RUN names, only these runs and the cases that need no others are made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkout import ROOT

from tests.explain.injections import BROKEN, CASES, COMPUTING, PAIRS, WAITING, Bench, matrix, page
from tests.explain.magnitudes import FAULTS
from tests.explain.magnitudes import table as magnitudes

DOCUMENT = ROOT / "docs" / "DIAGNOSIS.md"


def main(arguments: list[str]) -> int:
    """Run the cases and print the matrix."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--write", action="store_true", help="Also write docs/DIAGNOSIS.md.")
    args = parser.parse_args(arguments)
    names = set(args.runs) or None
    if names is not None and (unknown := names - {run.name for run in (*COMPUTING, *WAITING, *BROKEN, *PAIRS)}):
        parser.error(f"unknown runs: {', '.join(sorted(unknown))}")
    if names is not None and args.write:
        parser.error("--write needs all runs: give no RUN")
    bench = Bench(args.directory.absolute())
    bench.prepare()
    bench.run(names)
    cases = [case for case in CASES if names is None or set(case.needs) <= names]
    found = {case.planted: [finding["rule"] for finding in bench.diagnose(case)] for case in cases}
    print(table := matrix(found))
    if names is None or {fault.run for fault in FAULTS} <= names:
        print(sizes := magnitudes(bench.sizes()))
        if args.write:
            DOCUMENT.write_text(page(table, sizes))
    return 1 if "WRONG" in table else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
