"""Slurm jobs: scripts, checks before submission, submission, state and logs."""
