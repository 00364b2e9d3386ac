"""Fixtures shared by the tests of observe and explain."""

from tests.observed_run import browser, capture_dir, run_dir, run_steps, toy_step  # noqa: F401
