"""Job scripts, submission and what becomes of jobs."""
