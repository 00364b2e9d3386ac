"""Exit codes of `ridge`. Job scripts use them to decide whether to requeue."""

from ridgeline.configs.errors import UserError

DONE = 0
"""The run finished, or the command succeeded."""
USAGE = 2
"""Invalid input: one line on stderr names the problem, its place, and what is allowed."""
HANG = 71
"""No step finished within the watchdog's limit: the watchdog ended this process."""
LOST_PEER = 72
"""Another process of the run ended by a failure or did not start."""
BAD_NODE = 73
"""The preflight failed a node; it is recorded in bad_nodes and excluded from the next start."""
NUMERICAL_FAILURE = 70
"""Too many consecutive non-finite steps, or a non-finite state when a save is due; neither is saved."""
SAVE_FAILURE = 74
"""Several consecutive checkpoints could not be written."""
PREEMPTED = 75
"""Stopped by SIGTERM after saving: run the same command again to continue."""
TAKEN_OVER = 76
"""Another start took the run directory over: this one wrote nothing more."""
CORRUPTION = 77
"""Silent data corruption was found; the nodes of the named devices are in bad_nodes and excluded from the next start."""
INTERRUPTED = 130
"""Stopped by Ctrl-C after saving: run the same command again to continue."""


_MEANINGS = {
    DONE: "finished",
    USAGE: "invalid input: see the last line",
    HANG: "hang: no progress, ended by the watchdog; requeued",
    LOST_PEER: "lost peer: another process ended or did not start; requeued",
    BAD_NODE: "bad node: failed the preflight, excluded; requeued",
    NUMERICAL_FAILURE: "numerical failure: too many non-finite steps",
    SAVE_FAILURE: "checkpoints could not be written",
    PREEMPTED: "preempted: saved after SIGTERM; requeued",
    TAKEN_OVER: "taken over: another start writes the run directory",
    CORRUPTION: "silent data corruption: node of the named device excluded; requeued",
    INTERRUPTED: "interrupted: saved after Ctrl-C",
}


def of(error: BaseException | None) -> int:
    """Return the exit code of a command that ends with this exception; None: it returned."""
    if error is None:
        return DONE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else DONE if error.code is None else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return USAGE if isinstance(error, UserError) else 1


def table() -> list[str]:
    """Return the table, one line per code, as job scripts and guides show it."""
    return [f"{code:>3}  {meaning}" for code, meaning in sorted(_MEANINGS.items())]
