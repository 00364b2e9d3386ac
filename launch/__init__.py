"""Starting runs: processes and their rendezvous, environment, Slurm jobs, preflight, trials of sweeps and studies."""
