#!/bin/sh
# Install Slurm for `make test-slurm` where that is possible: as root on a Debian machine. Prints what it does, and never fails the caller.
PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd srun munged; do
  command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Slurm (missing:$missing) ..."
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
else
  echo "Slurm is not installed (missing:$missing) and this is no root shell on Debian: the Slurm tests will be SKIPPED."
  echo "To run them: apt-get install slurmctld slurmd slurm-client munge"
fi
