#!/bin/bash
# Trains 'quickstart'.
# 2 nodes of generic x 8 processes = 16 devices.
# Written by ridgeline 0.1.0, commit 0123456789ab, 2026-11-21 07:00:00+00:00.

#SBATCH --job-name=quickstart
#SBATCH --chdir=/home/me/project                # relative paths of the config start here
#SBATCH --output=/shared/runs/quickstart/slurm/job-%j.log  # output of this script and all ranks
#SBATCH --open-mode=append                      # a requeued job appends to its log
#SBATCH --account=proj42
#SBATCH --qos=normal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8                     # one process per device
#SBATCH --cpus-per-task=12                      # of 96 cores per node
#SBATCH --gres=gpu:8                            # all devices of a node
#SBATCH --exclusive                             # no other jobs on these nodes
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300                       # SIGTERM to the ranks 300 s before the time limit: save and exit
#SBATCH --requeue                               # Slurm may restart it after preemption or a lost node

RUN=/shared/runs/quickstart
JOB="$RUN/slurm/1"                              # this submission: config, cluster file, code
PYTHON=/home/me/project/.venv/bin/python

set -e  # software: a failing command ends the job
export NCCL_DEBUG=INFO                          # as in the submitting shell
export PYTHONPATH="$JOB/code${PYTHONPATH:+:$PYTHONPATH}"  # the code as submitted
export PYTHONSAFEPATH=1                         # do not import from the working directory
set +e -uo pipefail

# Record of the environment: only variables that a run may depend on, because a secret may have any name.
ENVIRONMENT="$JOB/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt"
[ -L "$ENVIRONMENT" ] || {
  echo "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST at $(date --iso-8601=seconds)"
  "$PYTHON" --version
  ulimit -a
  type module >/dev/null 2>&1 && module list 2>&1
  env -0 | grep -zE '^((CUDA|GLOO|HIP|JAX|LIBTPU|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PMI|PMIX|RAYON|RIDGE|ROCM|ROCR|SLURM|TF|UCX|XLA)_[A-Za-z0-9_]*|HOSTNAME|LANG|LC_ALL|LD_LIBRARY_PATH|LD_PRELOAD|LOADEDMODULES|NPROC|PATH|PWD|PYTHONPATH|PYTHONSAFEPATH|SHELL|TMPDIR|TZ|USER|VIRTUAL_ENV)=' \
    | grep -zviE '^[^=]*(AUTH|COOKIE|CREDENTIAL|JWT|KEY|PASS|SECRET|TOKEN)' | sort -z | tr '\n\0' ' \n'
} > "$ENVIRONMENT"

# Preflight: check the nodes, within 10 minutes.
preflight() {
    srun --time=10 --cpus-per-task=12 \
        "$PYTHON" -m ridgeline doctor "$JOB/config.yaml" --cluster "$JOB/cluster.yaml" --run-dir "$RUN" --job
}

# Training. --label prefixes each line with its rank.
train() {
    srun --label --wait=120 --cpus-per-task=12 \
        "$PYTHON" -m ridgeline train "$JOB/config.yaml"
}

# Run the stages, then exit or requeue. Exit codes of ridge:
#     0  finished
#     2  invalid input: see the last line
#    70  numerical failure: too many non-finite steps
#    71  hang: no progress, ended by the watchdog; requeued
#    72  lost peer: another process ended or did not start; requeued
#    73  bad node: failed the preflight, excluded; requeued
#    74  checkpoints could not be written
#    75  preempted: saved after SIGTERM; requeued
#    76  taken over: another start writes the run directory
#    77  silent data corruption: node of the named device excluded; requeued
#   130  interrupted: saved after Ctrl-C
export RIDGE_GRACE_S=300
RIDGE_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RIDGE_SECRET                             # by which the processes of this start know each other
# SIGTERM to this shell, also to it alone (scancel --batch): the ranks get it too and save; this shell waits for them
SIGNALED=""
trap 'SIGNALED=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
BEGIN=$(date +%s)
( trap : TERM; preflight && train ) &
STAGES=$!
wait "$STAGES"
CODE=$?
while [ -n "$SIGNALED" ]; do SIGNALED=""; wait "$STAGES"; CODE=$?; done  # a signal ends a wait
trap : TERM
END=$(date +%s)
CHECKPOINT=$(find "$RUN/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | tail -n 1)
[ -L "$RUN/attempts.jsonl" ] || printf '{"job": %d, "restart": %d, "begin": %d, "end": %d, "exit_code": %d, "checkpoint": "%s"}\n' \
    "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$BEGIN" "$END" "$CODE" "${CHECKPOINT##*/}" >> "$RUN/attempts.jsonl"
# scontrol fails while the controller restarts
retry() { for _ in 1 2 3 4; do "$@" && return; sleep 15; done; return 1; }
INFO=$(retry scontrol show job --oneliner "$SLURM_JOB_ID")
STATE=$(grep -oE 'JobState=[A-Z_]+ Reason=[^ ]+' <<< "$INFO")
log() { echo "ridge job: $*"; }

case "$CODE" in
    0) log "finished"; exit 0 ;;
    2|70|74|76|130) log "exit code $CODE, not requeued: a restart would fail again"; exit "$CODE" ;;
    75) log "saved and stopped after SIGTERM" ;;
    143) log "stopped by SIGTERM during start-up" ;;
    71|72|73|77) log "exit code $CODE" ;;
    *) log "exit code $CODE: a rank or a node was lost" ;;
esac
# Slurm requeues the job of a lost node while this script may live on there: to requeue again would end the new start.
case "$INFO" in
    *" Restarts=${SLURM_RESTART_COUNT:-0} "*|"") ;;
    *) log "Slurm has requeued this job: not requeued here"; exit "$CODE" ;;
esac
if grep -q " Requeue=0 " <<< "$INFO"; then log "requeue is disabled (ridge cancel, or slurm.requeue: false)"; exit "$CODE"; fi
# RUNNING: also in the grace period of a preemption or of the time limit. TimeLimit: the ranks saved beyond the limit.
# In any other state the job was cancelled, or Slurm requeues it itself.
case "$STATE" in
    "JobState=RUNNING "*|*" Reason=TimeLimit") ;;
    *) log "cancelled, or requeued by Slurm ($STATE): not requeued here"; exit "$CODE" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ]; then
    log "20 restarts (slurm.max_restarts): not requeued"; exit "$CODE"
fi
PAUSE=0
if [ "$CODE" -ne 75 ] && [ "$CODE" -ne 143 ]; then
    # consecutive failed starts of this job without a new checkpoint
    FAILURES=$(grep -F "\"job\": $SLURM_JOB_ID," "$RUN/attempts.jsonl" | tail -n 5 \
        | grep -v '"exit_code": 75,' | grep -cF "\"checkpoint\": \"${CHECKPOINT##*/}\"")
    if [ "$FAILURES" -ge 5 ]; then log "5 failures without a new checkpoint: not requeued"; exit "$CODE"; fi
    [ $((END - BEGIN)) -lt 600 ] && PAUSE=$((10 * 3 ** (FAILURES - 1)))
fi
EXCLUDE=$(cut -d' ' -f1 "$RUN/bad_nodes" 2>/dev/null | sort -u | paste -sd, -)
log "requeueing${EXCLUDE:+ without $EXCLUDE} after a pause of $PAUSE s"
trap '' TERM                                    # Slurm terminates the rest of a requeued job: finish the last lines
ID="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"  # the array's id would requeue all its tasks
ID="${ID:-$SLURM_JOB_ID}"
retry scontrol requeue "$ID" || exit "$CODE"
# only a pending job can be updated, and this one stays pending until this script has ended
[ "$PAUSE" -gt 0 ] && scontrol update JobId="$ID" StartTime="now+$PAUSE"
EXCLUDED=$(grep -oE 'ExcNodeList=[^ ]+' <<< "$INFO" | cut -d= -f2 | grep -v null)
[ -n "$EXCLUDE" ] && scontrol update JobId="$ID" ExcNodeList="${EXCLUDED:+$EXCLUDED,}$EXCLUDE"
exit "$CODE"
