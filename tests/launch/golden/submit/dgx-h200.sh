#!/bin/bash
# Trains 'quickstart'.
# 2 nodes of dgx-h200 x 8 processes = 16 devices.
# Written by ridgeline 0.1.0, commit 0123456789ab, 2026-11-21 07:00:00+00:00.

#SBATCH --job-name=quickstart
#SBATCH --chdir=/home/me/project                # relative paths of the config start here
#SBATCH --output=/shared/runs/quickstart/slurm/job-%j.log  # this script and all ranks
#SBATCH --open-mode=append                      # a requeued job continues its log
#SBATCH --account=proj42
#SBATCH --qos=normal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8                     # one process per device
#SBATCH --cpus-per-task=14                      # of 112 cores per node
#SBATCH --gpus-per-node=8                       # all devices of a node
#SBATCH --mem=0                                 # 0: all memory of the node
#SBATCH --exclusive                             # no other job on these nodes
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300                       # to the ranks, 300 s before the limit: save and exit
#SBATCH --requeue                               # Slurm may start it again after preemption or a lost node

RUN=/shared/runs/quickstart
JOB="$RUN/slurm/1"                              # this submission: config, cluster file, code
PYTHON=/home/me/project/.venv/bin/python

set -e  # software: whatever fails here ends the job
export NCCL_DEBUG=INFO                          # as in the submitting shell
export PYTHONPATH="$JOB/code${PYTHONPATH:+:$PYTHONPATH}"  # the code as it was when submitted
export PYTHONSAFEPATH=1                         # and not what lies in the working directory
set +e -uo pipefail

# What this job found, for the record; values that look like secrets are masked.
{
  echo "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST at $(date --iso-8601=seconds)"
  "$PYTHON" --version
  ulimit -a
  type module >/dev/null 2>&1 && module list 2>&1
  env -0 | sort -z | sed -z -E 's/^([^=]*(KEY|TOKEN|SECRET|PASS|CREDENTIAL)[^=]*)=.*/\1=***/I' | tr '\0' '\n'
} > "$JOB/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt"

# Preflight: are these nodes fit? At most 10 minutes.
preflight() {
    srun --time=10 --cpus-per-task=14 \
        "$PYTHON" -m launch doctor "$JOB/config.yaml" --cluster "$JOB/cluster.yaml" --run-dir "$RUN" --job
}

# The run. --label puts the rank before each line.
train() {
    srun --label --wait=120 --cpus-per-task=14 \
        "$PYTHON" -m launch train "$JOB/config.yaml"
}

# What becomes of the job. Exit codes of ridge:
#     0  done
#     2  usage error: one line says what is wrong
#    70  numerical failure: too many non-finite steps
#    71  hang: no progress, ended by the watchdog; requeued
#    72  lost peer: another process died or never came; requeued
#    73  bad node: found by the preflight, excluded; requeued
#    74  checkpoints could not be written
#    75  preempted: saved after SIGTERM; requeued
#   130  interrupted: saved after Ctrl-C
export RIDGE_GRACE_S=300
trap : TERM                                     # the ranks get the signal and save; this shell waits for them
BEGIN=$(date +%s)
preflight && train
CODE=$?
END=$(date +%s)
NEWEST=$(find "$RUN/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1)
printf '{"job": %d, "restart": %d, "begin": %d, "end": %d, "exit_code": %d, "checkpoint": "%s"}\n' \
    "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$BEGIN" "$END" "$CODE" "${NEWEST##*/}" >> "$RUN/attempts.jsonl"
# a controller that is being restarted answers a little later
ask() { for _ in 1 2 3 4; do "$@" && return; sleep 15; done; return 1; }
SHOWN=$(ask scontrol show job --oneliner "$SLURM_JOB_ID")
STATE=$(grep -oE 'JobState=[A-Z_]+ Reason=[^ ]+' <<< "$SHOWN")
say() { echo "ridge job: $*"; }

case "$CODE" in
    0) say "done"; exit 0 ;;
    2|70|74|130) say "ended with $CODE: a restart would not mend it"; exit "$CODE" ;;
    75) say "saved and stopped as asked" ;;
    143) say "asked to stop before it could listen" ;;
    71|72|73) say "ended with $CODE" ;;
    *) say "ended with $CODE: a rank or a node was lost" ;;
esac
if grep -q " Requeue=0 " <<< "$SHOWN"; then say "not to be requeued (ridge cancel, or slurm.requeue: false)"; exit "$CODE"; fi
case "$STATE" in
    "JobState=RUNNING "*|*" Reason=TimeLimit") ;;
    *) say "cancelled, or requeued by Slurm ($STATE): not requeued here"; exit "$CODE" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ]; then
    say "restarted 20 times, as often as slurm.max_restarts allows: giving up"; exit "$CODE"
fi
PAUSE=0
if [ "$CODE" -ne 75 ] && [ "$CODE" -ne 143 ]; then
    # failed starts of this job in a row that ended with the same newest checkpoint
    FRUITLESS=$(grep -F "\"job\": $SLURM_JOB_ID," "$RUN/attempts.jsonl" | tail -n 5 \
        | grep -v '"exit_code": 75,' | grep -cF "\"checkpoint\": \"${NEWEST##*/}\"")
    if [ "$FRUITLESS" -ge 5 ]; then say "5 failures without a new checkpoint: giving up"; exit "$CODE"; fi
    [ $((END - BEGIN)) -lt 600 ] && PAUSE=$((10 * 3 ** (FRUITLESS - 1)))
fi
EXCLUDE=$(cut -d' ' -f1 "$RUN/bad_nodes" 2>/dev/null | sort -u | paste -sd, -)
say "requeueing${EXCLUDE:+ without $EXCLUDE}, not before $PAUSE s from now"
trap '' TERM                                    # Slurm ends what is left of a requeued job: not before the last line
ME="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"  # an array's own id would requeue all of its tasks
ME="${ME:-$SLURM_JOB_ID}"
ask scontrol requeue "$ME" || exit "$CODE"
# only a job that waits can be changed, and this one waits at least until this script has ended
[ "$PAUSE" -gt 0 ] && scontrol update JobId="$ME" StartTime="now+$PAUSE"
ALREADY=$(grep -oE 'ExcNodeList=[^ ]+' <<< "$SHOWN" | cut -d= -f2 | grep -v null)
[ -n "$EXCLUDE" ] && scontrol update JobId="$ME" ExcNodeList="${ALREADY:+$ALREADY,}$EXCLUDE"
exit "$CODE"
