"""A run that goes back before a loss spike, on a real Slurm: within its job, and killed after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ridgeline.launch.exit_codes import DONE
from ridgeline.rundir.skipped_batches import read_skipped_batches
from ridgeline.trainer.loss_spikes import ROLLBACK
from tests.slurm import jobs
from tests.trainer.test_rollback import BAD, STEPS, prepare_spiky_text

OVERRIDES = [
    *("data.shuffle=false", "evaluation.every=0", "optimizer.learning_rate=5e-3", "schedule.kind=constant", "schedule.warmup_steps=0"),
    *("loss_spikes.policy=rollback", "loss_spikes.window=32", "loss_spikes.sigmas=1.5"),
]


def test_a_run_goes_back_before_a_spike_and_a_later_start_leaves_its_batches_out_too(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path
) -> None:
    """Both ranks go back within the job, which needs no other; killed after that, the run ends bitwise as if it had not been."""
    sets = prepare_spiky_text(tmp_path, 8 * 32)
    (sets / "held").symlink_to(corpus / "held")
    own: dict[str, Any] = {"steps": STEPS, "programs": programs, "overrides": OVERRIDES}
    runs = [jobs.submit(slurm, tmp_path, sets, name, **own, **more) for name, more in (("whole", {}), ("killed", {"step_s": 0.1}))]
    whole, killed = runs
    slurm.until(lambda: any(e.kind == "step" and e.restart == 1 and e.fields["step"] > 42 for e in killed.events()), 600, "step 43 again")
    os.kill(jobs.ranks(killed)[1], signal.SIGKILL)
    for run in runs:
        run.finishes()
        [back] = _rollbacks(run)
        [left_out] = read_skipped_batches(run.directory).ranges
        assert (left_out.first, left_out.end) == (back.fields["first_batch"], back.fields["end_batch"])
        assert BAD - 2 <= left_out.first <= BAD and BAD + 3 <= left_out.end <= BAD + 6, left_out
    assert whole.codes() == [DONE] and whole.restarts() == 0, whole.log
    assert killed.codes()[-1] == DONE and killed.restarts() == 1, killed.log
    assert read_skipped_batches(whole.directory) == read_skipped_batches(killed.directory)
    jobs.assert_bitwise_equal(whole.arrays(), killed.arrays())


def _rollbacks(run: jobs.Run) -> list[Any]:
    return [event for event in run.events() if event.kind == ROLLBACK]
