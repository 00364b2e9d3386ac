"""Hugging Face checkpoints: import and export of weights and config.json."""
