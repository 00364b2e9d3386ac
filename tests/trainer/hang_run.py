"""One process of a run that is to hang: argv = faults (JSON file), cache of compiled programs, arguments of `ridge`.

The file: {"fault": of tests/explain/faults.py or null, "arguments": its arguments, "step": number, "limit_s": of a step, "save_s": of a
save}. The deadlines hold from that step on: a loaded machine may take long to start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

from tests.explain.faults import planted, use_cache


def main() -> None:
    """Run the command with the fault."""
    job = json.loads(Path(sys.argv[1]).read_text())
    use_cache(sys.argv[2])
    sys.argv = ["ridge", *sys.argv[3:]]
    from ridgeline.cli.main import main as ridge
    from ridgeline.trainer.watchdog import Watchdog

    step = Watchdog.step

    def shorter(dog: Watchdog, usual_s: float | None, steps: int | None = None) -> None:
        if steps is not None and steps >= job["step"]:
            dog._least_s, dog.deadlines = job["limit_s"], dog.deadlines.model_copy(update={"save_s": job["save_s"]})
        step(dog, usual_s, steps)

    with patch.object(Watchdog, "step", shorter), planted(job):
        ridge()


if __name__ == "__main__":
    main()
