"""The end of a job script: run the stages, read their exit code, and finish, give up, or put the job back into the queue.

Everything is plain bash in the script itself. A stage is a function the script has defined before (`preflight`, `train`).
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.cluster import SlurmConfig
from launch import exit_codes

QUICK_S = 600
"""A start that fails within this time is followed by a pause before the next one, twice as long after each failure in a row."""
PAUSE_S = 5
FRUITLESS = 3
"""Failed starts in a row without a new checkpoint after which a job gives up: something is broken that no restart mends."""


def supervised_lines(stages: Sequence[str], slurm: SlurmConfig) -> list[str]:
    """Return the bash lines that run the stages one after another and decide what becomes of the job.

    Needs the variables RUN (run directory) and JOB (directory of the submission). The job's own SIGTERM goes to the ranks; this shell
    outlives it. A job that was cancelled, or has reached its time limit, is no longer RUNNING to Slurm when its ranks have ended: it is not
    requeued. A preempted job is RUNNING through its grace period, and ends as finished unless it requeues itself.
    """
    restartable = [exit_codes.HANG, exit_codes.LOST_PEER, exit_codes.BAD_NODE]
    final = [exit_codes.USAGE, exit_codes.NUMERICAL_FAILURE, exit_codes.SAVE_FAILURE, exit_codes.INTERRUPTED]
    return [
        "# What becomes of the job. Exit codes of ridge:",
        *(f"#   {line}" for line in exit_codes.table()),
        f"export RIDGE_GRACE_S={slurm.signal_grace_s}",
        "trap : TERM                                     # the ranks get the signal and save; this shell waits for them",
        "BEGIN=$(date +%s)",
        f"{' && '.join(stages)}",
        "CODE=$?",
        "END=$(date +%s)",
        "NEWEST=$(find \"$RUN/checkpoints\" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1)",
        'printf \'{"job": %d, "restart": %d, "begin": %d, "end": %d, "exit_code": %d, "checkpoint": "%s"}\\n\' \\',
        '    "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$BEGIN" "$END" "$CODE" "${NEWEST##*/}" >> "$RUN/attempts.jsonl"',
        'SHOWN=$(scontrol show job --oneliner "$SLURM_JOB_ID")',
        "STATE=$(grep -oE 'JobState=[A-Z_]+' <<< \"$SHOWN\" | cut -d= -f2)",
        'say() { echo "ridge job: $*"; }',
        "",
        'case "$CODE" in',
        '    0) say "done"; exit 0 ;;',
        f'    {"|".join(map(str, final))}) say "ended with $CODE: a restart would not mend it"; exit "$CODE" ;;',
        f'    {exit_codes.PREEMPTED}) say "saved and stopped as asked" ;;',
        f'    {"|".join(map(str, restartable))}) say "ended with $CODE" ;;',
        '    *) say "ended with $CODE: a rank or a node was lost" ;;',
        "esac",
        'if grep -q " Requeue=0 " <<< "$SHOWN"; then say "not to be requeued (ridge cancel, or slurm.requeue: false)"; exit "$CODE"; fi',
        'if [ "$STATE" != RUNNING ]; then',
        '    say "the job is $STATE to Slurm (cancelled, or out of time): not requeued here"; exit "$CODE"',
        "fi",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {slurm.max_restarts} ]; then',
        f'    say "restarted {slurm.max_restarts} times, as often as slurm.max_restarts allows: giving up"; exit "$CODE"',
        "fi",
        f'if [ "$CODE" -ne {exit_codes.PREEMPTED} ]; then',
        "    # failed starts in a row that ended with the same newest checkpoint",
        f'    FRUITLESS=$(tail -n {FRUITLESS} "$RUN/attempts.jsonl" | grep -v \'"exit_code": {exit_codes.PREEMPTED},\' \\',
        '        | grep -cF "\\"checkpoint\\": \\"${NEWEST##*/}\\"")',
        f'    if [ "$FRUITLESS" -ge {FRUITLESS} ]; then say "{FRUITLESS} failures without a new checkpoint: giving up"; exit "$CODE"; fi',
        f"    if [ $((END - BEGIN)) -lt {QUICK_S} ]; then",
        f"        PAUSE=$(({PAUSE_S} << FRUITLESS))",
        '        say "failed after $((END - BEGIN)) s: pausing $PAUSE s"; sleep "$PAUSE"',
        "    fi",
        "fi",
        "EXCLUDE=$(cut -d' ' -f1 \"$RUN/bad_nodes\" 2>/dev/null | sort -u | paste -sd, -)",
        'say "requeueing${EXCLUDE:+ without $EXCLUDE}"',
        'if [ -n "$EXCLUDE" ]; then',
        "    # a running job's list cannot be changed: hold it, change it, let it go",
        '    scontrol requeuehold "$SLURM_JOB_ID" && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$EXCLUDE"',
        '    scontrol release "$SLURM_JOB_ID"',
        "else",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "sleep 60                                        # Slurm ends this shell now",
        'exit "$CODE"',
    ]
