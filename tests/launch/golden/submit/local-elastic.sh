#!/bin/bash
# Trains 'quickstart'.
# 2 nodes of local x 1 process = 2 devices; goes on with 2 1 nodes, 1 spare.
# Written by ridgeline 0.1.0, commit 0123456789ab, 2026-11-21 07:00:00+00:00.

#SBATCH --job-name=quickstart
#SBATCH --chdir=/home/me/project                # relative paths of the config start here
#SBATCH --output=/shared/runs/quickstart/slurm/job-%j.log  # output of this script and all ranks
#SBATCH --open-mode=append                      # a requeued job appends to its log
#SBATCH --account=proj42
#SBATCH --qos=normal
#SBATCH --nodes=3                               # of them 1 spare
#SBATCH --no-kill                               # a lost node does not end the job
#SBATCH --ntasks-per-node=1                     # one process per device
#SBATCH --cpus-per-task=2                       # of 2 cores per node
#SBATCH --exclusive                             # no other jobs on these nodes
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@60                        # SIGTERM to the ranks 60 s before the time limit: save and exit
#SBATCH --requeue                               # Slurm may restart it after preemption or a lost node

RUN=/shared/runs/quickstart
JOB="$RUN/slurm/1"                              # this submission: config, cluster file, code
PYTHON=/home/me/project/.venv/bin/python

set -e  # software: a failing command ends the job
export JAX_PLATFORMS=cpu
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
    srun "${PLACE[@]}" --time=10 --cpus-per-task=2 \
        "$PYTHON" -m ridgeline doctor "$JOB/config.yaml" "${LAYOUT[@]}" --cluster "$JOB/cluster.yaml" --run-dir "$RUN" --job
}

# Training. --label prefixes each line with its rank.
train() {
    srun "${PLACE[@]}" --label --wait=120 --cpus-per-task=2 \
        "$PYTHON" -m ridgeline train "$JOB/config.yaml" "${LAYOUT[@]}"
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
export RIDGE_GRACE_S=60
# Elastic: a start runs on good nodes of the allocation, the others are spares. Settings by number of nodes:
layout() {
    case "$1" in
        2) echo "mesh.data=1 mesh.fsdp=2 trainer.accumulation=1" ;;
        1) echo "mesh.data=1 mesh.fsdp=1 trainer.accumulation=2" ;;
    esac
}
SIZES="2 1"                                   # numbers of nodes with a layout, largest first
size_for() { for n in $SIZES; do [ "$n" -le "$1" ] && echo "$n" && return; done; echo 0; }
own_nodes() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N; }
not_bad() { sort -u | grep -vxFf <(cut -d' ' -f1 "$RUN/bad_nodes" 2>/dev/null); }
# the nodes of the allocation that start a process
good_nodes() {
    for node in $(scontrol show hostnames "$(own_nodes)" | not_bad); do
        (timeout 60 srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" true >/dev/null 2>&1 && echo "$node") &
    done
    wait
}
# how many nodes the job could have: its own that respond, and idle ones
available() {
    { sinfo --noheader --Node --responding --nodes="$(own_nodes)" --states=alloc,mix,comp,idle --format=%N
      sinfo --noheader --Node --responding --partition="$SLURM_JOB_PARTITION" --states=idle --format=%N; } | not_bad | wc -l
}
# After a requeue: request as many nodes as there are. Without a layout for them, wait for the fewest.
request_nodes() {
    local n
    n=$(size_for "$1")
    [ "$n" -eq 0 ] && n=${SIZES##* }
    [ "$n" -eq 2 ] && n=$(($1 < 3 ? $1 : 3))
    echo "ridge job: the next start requests $n of 3 nodes"
    scontrol update JobId="$SLURM_JOB_ID" NumNodes="$n" NumTasks=$((n * 1)) NumCPUs=$((n * 1 * 2))
}
choose_nodes() {
    mapfile -t GOOD < <(good_nodes | sort -V)
    SIZE=$(size_for "${#GOOD[@]}")
    NODES=$(IFS=,; echo "${GOOD[*]:0:SIZE}")
    SPARES=$(IFS=,; echo "${GOOD[*]:SIZE}")
    read -ra LAYOUT <<< "$(layout "$SIZE")"
    # --overlap: Slurm 22.05 keeps the step of a lost node, and its cores, until the job ends
    PLACE=(--overlap --nodes="$SIZE" --ntasks=$((SIZE * 1)) --ntasks-per-node=1 --nodelist="$NODES")
    [ -L "$RUN/nodes.jsonl" ] || printf '{"job": %d, "begin": %d, "nodes": %d, "of": %d, "spares": %d, "names": "%s", "spare_names": "%s"}\n' \
        "$SLURM_JOB_ID" "$(date +%s)" "$SIZE" 2 $((${#GOOD[@]} - SIZE)) "$NODES" "$SPARES" >> "$RUN/nodes.jsonl"
}
placed() {
    echo "ridge job: start on $SIZE of 2 nodes: ${NODES:-only ${#GOOD[@]} good ones}${SPARES:+, spare: $SPARES}"
    [ "$SIZE" -gt 0 ] || return 73
}
# On fewer nodes than submitted: have the ranks save and stop once there are enough nodes for more. The job is then requeued.
grow() {
    trap 'kill $! 2>/dev/null; exit' TERM
    while [ "$SIZE" -lt 2 ]; do
        sleep 600 & wait $!
        [ "$(size_for "$(available)")" -gt "$SIZE" ] && scancel --signal=TERM "$SLURM_JOB_ID" && return
    done
}
# On another node: requeue the job if the node of this script is lost. With --no-kill Slurm leaves the job running without a script.
# shellcheck disable=SC2317,SC2329  # called by srun
guard() {
    exec >> "$JOB/guard.log" 2>&1               # srun, which would write it, is lost with the node
    trap '[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ] || exit 0' TERM
    while :; do
        sleep 10 & wait $!
        NOW=$(own_nodes) || continue
        [ -n "$NOW" ] || continue
        scontrol show hostnames "$NOW" | grep -qx "$1" && continue
        COUNT=$(available)
        trap '' TERM                            # the requeue ends this process too: finish first
        echo "ridge job: the node of the job script, $1, is lost: requeueing"
        scontrol requeue "$SLURM_JOB_ID"
        for _ in 1 2 3 4 5 6 7 8; do request_nodes "$COUNT" && return; sleep 2; done
        return
    done
}
start_guard() {
    local other
    [ -n "$GUARD" ] && kill -0 "$GUARD" 2>/dev/null && return
    for other in "${GOOD[@]}"; do [ "$other" != "$SLURMD_NODENAME" ] && break; done
    [ "${other:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] && return
    srun --overlap --job-name=guard --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$other" --output=/dev/null \
        bash -c "guard $SLURMD_NODENAME" &
    GUARD=$!
}
# Whether to start again in this allocation: after a failure, and not twice without a new checkpoint unless a node was found bad
again() {
    case "$CODE" in 0|2|70|74|76|130|75|143) return 1 ;; esac
    case "$INFO" in *" Requeue=0 "*) return 1 ;; *" Restarts=${SLURM_RESTART_COUNT:-0} "*) ;; *) return 1 ;; esac
    case "$STATE" in "JobState=RUNNING "*) ;; *) return 1 ;; esac
    [ "$CODE" -ne 73 ] && [ "$CHECKPOINT" = "$LAST" ] && return 1
    LAST=$CHECKPOINT
    END_S=$(date -d "$(grep -oE ' EndTime=[^ ]+' <<< "$INFO" | cut -d= -f2)" +%s 2>/dev/null || echo 9999999999)
    [ $((END_S - END)) -gt $((2 * 60)) ] || return 1
    [ "$(grep -cF "\"job\": $SLURM_JOB_ID," "$RUN/attempts.jsonl")" -le 20 ] || return 1
    choose_nodes
    [ "$SIZE" -gt 0 ] || return 1
    echo "ridge job: exit code $CODE: starting again in this allocation"
}
export RUN JOB SIZES
export -f guard own_nodes not_bad available size_for request_nodes
LAST="none yet"
GUARD=""
choose_nodes
while :; do
RIDGE_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RIDGE_SECRET                             # by which the processes of this start know each other
# SIGTERM to this shell, also to it alone (scancel --batch): the ranks get it too and save; this shell waits for them
SIGNALED=""
trap 'SIGNALED=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
BEGIN=$(date +%s)
start_guard
grow &
WATCH=$!
( trap : TERM; placed && preflight && train ) &
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
kill "$WATCH" 2>/dev/null
again || break
done

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
COUNT=$(available)
retry scontrol requeue "$ID" || exit "$CODE"
request_nodes "$COUNT"
# only a pending job can be updated, and this one stays pending until this script has ended
[ "$PAUSE" -gt 0 ] && scontrol update JobId="$ID" StartTime="now+$PAUSE"
EXCLUDED=$(grep -oE 'ExcNodeList=[^ ]+' <<< "$INFO" | cut -d= -f2 | grep -v null)
[ -n "$EXCLUDE" ] && scontrol update JobId="$ID" ExcNodeList="${EXCLUDED:+$EXCLUDED,}$EXCLUDE"
exit "$CODE"
