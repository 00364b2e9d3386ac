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

# Record of the environment: only variables that a run may depend on, because a secret may have any name.
ENVIRONMENT="$JOB/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt"
[ -L "$ENVIRONMENT" ] || {
  echo "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST at $(date --iso-8601=seconds)"
@{python_version}
  ulimit -a
  type module >/dev/null 2>&1 && module list 2>&1
  env -0 | grep -zE '^((@{prefixes})_[A-Za-z0-9_]*|@{names})=' \
    | grep -zviE '^[^=]*(@{never})' | sort -z | tr '\n\0' ' \n'
} > "$ENVIRONMENT"

@{stages}
