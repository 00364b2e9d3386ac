"""Put this checkout first on the module search path, here and in child processes, so that benchmarks run without installation.

Every benchmark imports this module before `ridgeline`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry != str(ROOT))]
if str(ROOT) not in (inherited := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, inherited)])


def leave_directory() -> None:
    """Take the folder of the benchmarks off the module search path: packages that look for optional ones, as transformers for `kernels`,
    would find these files. Call it before such a package is imported."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
