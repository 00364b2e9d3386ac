# Run the stages, then exit or requeue. Exit codes of ridge:
@{exit_codes}
export RIDGE_GRACE_S=@{grace_s}
@{elastic}
@{each_start}
RIDGE_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RIDGE_SECRET                             # by which the processes of this start know each other
# SIGTERM to this shell, also to it alone (scancel --batch): the ranks get it too and save; this shell waits for them
SIGNALED=""
trap 'SIGNALED=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
BEGIN=$(date +%s)
@{watch}
( trap : TERM; @{stages} ) &
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
@{until_done}

case "$CODE" in
    0) log "finished"; exit 0 ;;
    @{final}) log "exit code $CODE, not requeued: a restart would fail again"; exit "$CODE" ;;
    @{preempted}) log "saved and stopped after SIGTERM" ;;
    143) log "stopped by SIGTERM during start-up" ;;
    @{lost}) log "exit code $CODE" ;;
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
if [ "${SLURM_RESTART_COUNT:-0}" -ge @{max_restarts} ]; then
    log "@{max_restarts} restarts (slurm.max_restarts): not requeued"; exit "$CODE"
fi
PAUSE=0
if [ "$CODE" -ne @{preempted} ] && [ "$CODE" -ne 143 ]; then
    # consecutive failed starts of this job without a new checkpoint
    FAILURES=$(grep -F "\"job\": $SLURM_JOB_ID," "$RUN/attempts.jsonl" | tail -n @{max_failures} \
        | grep -v '"exit_code": @{preempted},' | grep -cF "\"checkpoint\": \"${CHECKPOINT##*/}\"")
    if [ "$FAILURES" -ge @{max_failures} ]; then log "@{max_failures} failures without a new checkpoint: not requeued"; exit "$CODE"; fi
    [ $((END - BEGIN)) -lt @{quick_s} ] && PAUSE=$((@{pause_s} * 3 ** (FAILURES - 1)))
fi
EXCLUDE=$(cut -d' ' -f1 "$RUN/bad_nodes" 2>/dev/null | sort -u | paste -sd, -)
log "requeueing${EXCLUDE:+ without $EXCLUDE} after a pause of $PAUSE s"
trap '' TERM                                    # Slurm terminates the rest of a requeued job: finish the last lines
ID="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"  # the array's id would requeue all its tasks
ID="${ID:-$SLURM_JOB_ID}"
@{count_nodes}
retry scontrol requeue "$ID" || exit "$CODE"
@{request_nodes}
# only a pending job can be updated, and this one stays pending until this script has ended
[ "$PAUSE" -gt 0 ] && scontrol update JobId="$ID" StartTime="now+$PAUSE"
EXCLUDED=$(grep -oE 'ExcNodeList=[^ ]+' <<< "$INFO" | cut -d= -f2 | grep -v null)
[ -n "$EXCLUDE" ] && scontrol update JobId="$ID" ExcNodeList="${EXCLUDED:+$EXCLUDED,}$EXCLUDE"
exit "$CODE"
