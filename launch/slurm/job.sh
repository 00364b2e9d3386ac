#!/bin/bash@{login}
# @{title}
# @{shape}.
# Written by @{written}.

@{sbatch}

@{variables}
PYTHON=@{python}

set -e  # software: a failing command ends the job
@{software}
export PYTHONPATH="$JOB/code${PYTHONPATH:+:$PYTHONPATH}"  # the code as submitted
export PYTHONSAFEPATH=1                         # do not import from the working directory
set +e -uo pipefail

# Record of the environment; values whose names look like secrets are masked.
{
  echo "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST at $(date --iso-8601=seconds)"
@{python_version}
  ulimit -a
  type module >/dev/null 2>&1 && module list 2>&1
  env -0 | sort -z | sed -z -E 's/^([^=]*(KEY|TOKEN|SECRET|PASS|CREDENTIAL)[^=]*)=.*/\1=***/I' | tr '\0' '\n'
} > "$JOB/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt"

@{stages}
