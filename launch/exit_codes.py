"""Exit codes of `ridge`, in one table: job scripts decide by them whether to requeue."""

DONE = 0
"""The run finished, or the command answered."""
USAGE = 2
"""Bad input: one line on stderr says what, where and what is allowed."""
HANG = 71
"""No step finished for too long: the watchdog ended this process."""
LOST_PEER = 72
"""Another process of the run died or never came."""
BAD_NODE = 73
"""The preflight found this node unfit; it is named and excluded from the next start."""
NUMERICAL_FAILURE = 70
"""Too many non-finite steps in a row; the last good checkpoint is intact."""
SAVE_FAILURE = 74
"""Checkpoints could not be written several times in a row."""
PREEMPTED = 75
"""Stopped by SIGTERM after saving: run the same command again to continue."""
INTERRUPTED = 130
"""Stopped by Ctrl-C after saving: run the same command again to continue."""
