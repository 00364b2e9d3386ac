"""Running the same work at several scales or settings: trials on disk, on this machine or through Slurm."""
