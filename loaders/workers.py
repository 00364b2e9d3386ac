"""A pool of worker processes that exit when their parent does.

Processes are spawned, so they inherit nothing of the parent (threads, JAX, locks). Each receives one task at a time over its own pipe and
sends messages back. A worker exits when its parent has exited, even by SIGKILL, so that no orphan writes into a resumed run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ridgeline.configs.errors import UserError

Send = Callable[[Any], None]
Work = Callable[[Any, Send], Any]
"""(task, send) -> result. Must be importable by name; `send` sends messages to the parent while the task runs."""


def run_tasks(
    work: Work,
    tasks: Sequence[Any],
    workers: int,
    on_result: Callable[[Any, Any], None],
    on_message: Callable[[Any], None] = lambda message: None,
    on_wait: Callable[[], None] = lambda: None,
    wait_s: float = 0.2,
) -> None:
    """Run `work` on every task in `workers` processes; `on_result(task, result)` is called in this process as tasks finish, in any order.

    A UserError in a task is raised here. All workers have exited when this returns or raises.
    `on_wait` is called at least every `wait_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    pending = list(reversed(tasks))
    processes: dict[Connection, Any] = {}
    running: dict[Connection, Any] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
            running[ours] = pending.pop()
            ours.send(running[ours])
        while running:
            for connection in wait(list(running), timeout=wait_s):
                assert isinstance(connection, Connection)
                _receive(connection, processes, running, pending, on_result, on_message)
            on_wait()
    finally:
        for connection, process in processes.items():
            process.terminate()
            process.join()
            connection.close()


def _receive(
    connection: Connection,
    processes: dict[Connection, Any],
    running: dict[Connection, Any],
    pending: list[Any],
    on_result: Callable[[Any, Any], None],
    on_message: Callable[[Any], None],
) -> None:
    try:
        kind, payload = connection.recv()
    except (EOFError, ConnectionResetError):
        processes[connection].join()
        code = processes[connection].exitcode
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise UserError(f"a worker process exited unexpectedly ({cause}; out of memory?); run the same command again to continue") from None
    if kind == "message":
        on_message(payload)
    elif kind == "user_error":
        raise UserError(payload)
    elif kind == "bug":
        raise RuntimeError(f"a worker process failed:\n{payload}")
    else:
        on_result(running.pop(connection), payload)
        if pending:
            running[connection] = pending.pop()
            connection.send(running[connection])


def _serve(work: Work, connection: Connection) -> None:
    """Main loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes; the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            reply = ("result", work(task, lambda message: connection.send(("message", message))))
        except UserError as error:
            reply = ("user_error", str(error))
        except Exception:
            reply = ("bug", traceback.format_exc())
        connection.send(reply)


def leave_signals_to_parent() -> None:
    """Make this worker process ignore Ctrl-C and SIGTERM, which reach a whole job at once, and exit with its parent.

    The parent handles the signals: a training run still needs the batches of its last steps from its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
