#!/bin/bash
# Trains 'quickstart'.
# 2 nodes of dgx-b200 x 8 processes = 16 devices.
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

preflight && train
