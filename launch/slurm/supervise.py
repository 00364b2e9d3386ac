"""The end of a job script: run the stages, read their exit code, and finish, give up, or put the job back into the queue.

Everything is plain bash in the script itself. A stage is a function the script has defined before (`preflight`, `train`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.configs.cluster import SlurmConfig
from ridgeline.launch import exit_codes

QUICK_S = 600
"""A start that fails within this time is followed by a pause before the next one."""
PAUSE_S = 10
"""After the first failure; three times as long after each further one in a row. The job waits in the queue: no node is held."""
FRUITLESS = 5
"""Failed starts in a row without a new checkpoint after which a job gives up: something is broken that no restart mends."""


def supervised_lines(stages: Sequence[str], slurm: SlurmConfig) -> list[str]:
    """Return the bash lines that run the stages one after another and decide what becomes of the job.

    Needs the variables RUN (run directory) and JOB (directory of the submission). The job's own SIGTERM goes to the ranks; this shell
    outlives it. A preempted job is RUNNING through its grace period, and so is one that is told of its time limit; one that was saving
    beyond the limit is COMPLETING for the reason TimeLimit. Any other job that is not RUNNING when its ranks have ended was cancelled, or
    Slurm puts it back itself.
    """
    return [*_run_lines(stages, slurm), "", *_requeue_lines(slurm)]


def _run_lines(stages: Sequence[str], slurm: SlurmConfig) -> list[str]:
    """Run the stages; find out how they ended and what Slurm thinks of the job."""
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
        "# a controller that is being restarted answers a little later",
        'ask() { for _ in 1 2 3 4; do "$@" && return; sleep 15; done; return 1; }',
        'SHOWN=$(ask scontrol show job --oneliner "$SLURM_JOB_ID")',
        "STATE=$(grep -oE 'JobState=[A-Z_]+ Reason=[^ ]+' <<< \"$SHOWN\")",
        'say() { echo "ridge job: $*"; }',
    ]


def _requeue_lines(slurm: SlurmConfig) -> list[str]:
    """Decide by the exit code and Slurm's state, and requeue or not."""
    lost = [exit_codes.HANG, exit_codes.LOST_PEER, exit_codes.BAD_NODE]
    final = [exit_codes.USAGE, exit_codes.NUMERICAL_FAILURE, exit_codes.SAVE_FAILURE, exit_codes.INTERRUPTED]
    return [
        'case "$CODE" in',
        '    0) say "done"; exit 0 ;;',
        f'    {"|".join(map(str, final))}) say "ended with $CODE: a restart would not mend it"; exit "$CODE" ;;',
        f'    {exit_codes.PREEMPTED}) say "saved and stopped as asked" ;;',
        '    143) say "asked to stop before it could listen" ;;',
        f'    {"|".join(map(str, lost))}) say "ended with $CODE" ;;',
        '    *) say "ended with $CODE: a rank or a node was lost" ;;',
        "esac",
        'if grep -q " Requeue=0 " <<< "$SHOWN"; then say "not to be requeued (ridge cancel, or slurm.requeue: false)"; exit "$CODE"; fi',
        'case "$STATE" in',
        '    "JobState=RUNNING "*|*" Reason=TimeLimit") ;;',
        '    *) say "cancelled, or requeued by Slurm ($STATE): not requeued here"; exit "$CODE" ;;',
        "esac",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {slurm.max_restarts} ]; then',
        f'    say "restarted {slurm.max_restarts} times, as often as slurm.max_restarts allows: giving up"; exit "$CODE"',
        "fi",
        "PAUSE=0",
        f'if [ "$CODE" -ne {exit_codes.PREEMPTED} ] && [ "$CODE" -ne 143 ]; then',
        "    # failed starts of this job in a row that ended with the same newest checkpoint",
        f'    FRUITLESS=$(grep -F "\\"job\\": $SLURM_JOB_ID," "$RUN/attempts.jsonl" | tail -n {FRUITLESS} \\',
        f'        | grep -v \'"exit_code": {exit_codes.PREEMPTED},\' | grep -cF "\\"checkpoint\\": \\"${{NEWEST##*/}}\\"")',
        f'    if [ "$FRUITLESS" -ge {FRUITLESS} ]; then say "{FRUITLESS} failures without a new checkpoint: giving up"; exit "$CODE"; fi',
        f"    [ $((END - BEGIN)) -lt {QUICK_S} ] && PAUSE=$(({PAUSE_S} * 3 ** (FRUITLESS - 1)))",
        "fi",
        "EXCLUDE=$(cut -d' ' -f1 \"$RUN/bad_nodes\" 2>/dev/null | sort -u | paste -sd, -)",
        'say "requeueing${EXCLUDE:+ without $EXCLUDE}, not before $PAUSE s from now"',
        "trap '' TERM                                    # Slurm ends what is left of a requeued job: not before the last line",
        'ME="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"  # an array\'s own id would requeue all of its tasks',
        'ME="${ME:-$SLURM_JOB_ID}"',
        'ask scontrol requeue "$ME" || exit "$CODE"',
        "# only a job that waits can be changed, and this one waits at least until this script has ended",
        '[ "$PAUSE" -gt 0 ] && scontrol update JobId="$ME" StartTime="now+$PAUSE"',
        "ALREADY=$(grep -oE 'ExcNodeList=[^ ]+' <<< \"$SHOWN\" | cut -d= -f2 | grep -v null)",
        '[ -n "$EXCLUDE" ] && scontrol update JobId="$ME" ExcNodeList="${ALREADY:+$ALREADY,}$EXCLUDE"',
        'exit "$CODE"',
    ]
