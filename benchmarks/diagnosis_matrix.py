"""The confusion matrix of the diagnosis: `python benchmarks/diagnosis_matrix.py DIRECTORY [--write] [RUN...]`.

Plants every fault of tests/explain/injections.py in real runs under DIRECTORY, diagnoses each and prints the matrix as Markdown; exit code
1 when a rule that should come first does not, or a control accuses somebody. About three minutes of CPU. --write: docs/DIAGNOSIS.md, too.
With run names only those runs are made, and the cases they suffice for diagnosed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.explain.injections import CASES, Bench, matrix, page
from tests.explain.magnitudes import FAULTS
from tests.explain.magnitudes import table as magnitudes

DOCUMENT = Path(__file__).parents[1] / "docs" / "DIAGNOSIS.md"


def main(arguments: list[str]) -> int:
    """Run the cases and print the matrix."""
    write = "--write" in arguments
    directory, *rest = [argument for argument in arguments if argument != "--write"]
    names = set(rest) or None
    bench = Bench(Path(directory).absolute())
    bench.prepare()
    bench.run(names)
    cases = [case for case in CASES if names is None or set(case.needs) <= names]
    found = {case.planted: [finding["rule"] for finding in bench.diagnose(case)] for case in cases}
    print(table := matrix(found))
    if names is None or {fault.run for fault in FAULTS} <= names:
        print(sizes := magnitudes(bench.sizes()))
        if write:
            DOCUMENT.write_text(page(table, sizes))
    return 1 if "WRONG" in table else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
