"""Preflight: whether a node is fit for training. Run by `ridge doctor` and at the start of every job."""
