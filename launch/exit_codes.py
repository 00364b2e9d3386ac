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
"""Too many non-finite steps in a row, or a state that is not finite where a save is due; neither is saved."""
SAVE_FAILURE = 74
"""Checkpoints could not be written several times in a row."""
PREEMPTED = 75
"""Stopped by SIGTERM after saving: run the same command again to continue."""
INTERRUPTED = 130
"""Stopped by Ctrl-C after saving: run the same command again to continue."""


_MEANINGS = {
    DONE: "done",
    USAGE: "usage error: one line says what is wrong",
    HANG: "hang: no progress, ended by the watchdog; requeued",
    LOST_PEER: "lost peer: another process died or never came; requeued",
    BAD_NODE: "bad node: found by the preflight, excluded; requeued",
    NUMERICAL_FAILURE: "numerical failure: too many non-finite steps",
    SAVE_FAILURE: "checkpoints could not be written",
    PREEMPTED: "preempted: saved after SIGTERM; requeued",
    INTERRUPTED: "interrupted: saved after Ctrl-C",
}


def table() -> list[str]:
    """Return the table, a line per code: what job scripts and guides show."""
    return [f"{code:>3}  {meaning}" for code, meaning in sorted(_MEANINGS.items())]
