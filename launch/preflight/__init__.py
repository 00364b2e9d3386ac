"""Is this node fit to train: `ridge doctor`, alone and at the start of every job."""
