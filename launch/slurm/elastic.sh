# Elastic: a start runs on good nodes of the allocation, the others are spares. Settings by number of nodes:
layout() {
    case "$1" in
@{layouts}
    esac
}
SIZES="@{sizes}"                                   # numbers of nodes with a layout, largest first
size_for() { for n in $SIZES; do [ "$n" -le "$1" ] && echo "$n" && return; done; echo 0; }
own_nodes() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N; }
not_bad() { sort -u | grep -vxFf <(cut -d' ' -f1 "$RUN/bad_nodes" 2>/dev/null); }
# the nodes of the allocation that start a process
good_nodes() {
    for node in $(scontrol show hostnames "$(own_nodes)" | not_bad); do
        (timeout @{probe_s} srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" true >/dev/null 2>&1 && echo "$node") &
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
    [ "$n" -eq @{nodes} ] && n=$(($1 < @{most} ? $1 : @{most}))
    echo "ridge job: the next start requests $n of @{most} nodes"
    scontrol update JobId="$SLURM_JOB_ID" NumNodes="$n" NumTasks=$((n * @{tasks})) NumCPUs=$((n * @{tasks} * @{cpus}))
}
choose_nodes() {
    mapfile -t GOOD < <(good_nodes | sort -V)
    SIZE=$(size_for "${#GOOD[@]}")
    NODES=$(IFS=,; echo "${GOOD[*]:0:SIZE}")
    SPARES=$(IFS=,; echo "${GOOD[*]:SIZE}")
    read -ra LAYOUT <<< "$(layout "$SIZE")"
    # --overlap: Slurm 22.05 keeps the step of a lost node, and its cores, until the job ends
    PLACE=(--overlap --nodes="$SIZE" --ntasks=$((SIZE * @{tasks})) --ntasks-per-node=@{tasks} --nodelist="$NODES")
    [ -L "$RUN/nodes.jsonl" ] || printf '{"job": %d, "begin": %d, "nodes": %d, "of": %d, "spares": %d, "names": "%s", "spare_names": "%s"}\n' \
        "$SLURM_JOB_ID" "$(date +%s)" "$SIZE" @{nodes} $((${#GOOD[@]} - SIZE)) "$NODES" "$SPARES" >> "$RUN/nodes.jsonl"
}
placed() {
    echo "ridge job: start on $SIZE of @{nodes} nodes: ${NODES:-only ${#GOOD[@]} good ones}${SPARES:+, spare: $SPARES}"
    [ "$SIZE" -gt 0 ] || return @{bad_node}
}
# On fewer nodes than submitted: have the ranks save and stop once there are enough nodes for more. The job is then requeued.
grow() {
    trap 'kill $! 2>/dev/null; exit' TERM
    while [ "$SIZE" -lt @{nodes} ]; do
        sleep @{grow_s} & wait $!
        [ "$(size_for "$(available)")" -gt "$SIZE" ] && scancel --signal=TERM "$SLURM_JOB_ID" && return
    done
}
# On another node: requeue the job if the node of this script is lost. With --no-kill Slurm leaves the job running without a script.
# shellcheck disable=SC2317,SC2329  # called by srun
guard() {
    exec >> "$JOB/guard.log" 2>&1               # srun, which would write it, is lost with the node
    trap '[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ] || exit 0' TERM
    while :; do
        sleep @{guard_s} & wait $!
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
    case "$CODE" in 0|@{final}|@{preempted}|143) return 1 ;; esac
    case "$INFO" in *" Requeue=0 "*) return 1 ;; *" Restarts=${SLURM_RESTART_COUNT:-0} "*) ;; *) return 1 ;; esac
    case "$STATE" in "JobState=RUNNING "*) ;; *) return 1 ;; esac
    [ "$CODE" -ne @{bad_node} ] && [ "$CHECKPOINT" = "$LAST" ] && return 1
    LAST=$CHECKPOINT
    END_S=$(date -d "$(grep -oE ' EndTime=[^ ]+' <<< "$INFO" | cut -d= -f2)" +%s 2>/dev/null || echo 9999999999)
    [ $((END_S - END)) -gt $((2 * @{grace_s})) ] || return 1
    [ "$(grep -cF "\"job\": $SLURM_JOB_ID," "$RUN/attempts.jsonl")" -le @{max_restarts} ] || return 1
    choose_nodes
    [ "$SIZE" -gt 0 ] || return 1
    echo "ridge job: exit code $CODE: starting again in this allocation"
}
export RUN JOB SIZES
export -f guard own_nodes not_bad available size_for request_nodes
LAST="none yet"
GUARD=""
choose_nodes
