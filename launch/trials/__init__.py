"""Trials of sweeps and studies."""
