"""Progress on stderr: one line per event, or a bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ridgeline.loaders.prepare import Progress

PLAIN_LINE_EVERY_S = 10.0


def print_progress(line: str) -> None:
    """Print a line on stderr, so that stdout contains only the result."""
    click.echo(line, err=True)


def print_measuring(what: str) -> None:
    """Print on stderr what is being measured."""
    click.echo(f"measuring {what}", err=True)


@contextlib.contextmanager
def prepare_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that shows progress on stderr: a bar on a terminal, otherwise a line every 10 s."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
        return
    last_s = time.monotonic()

    def print_line(progress: Progress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PLAIN_LINE_EVERY_S:
            last_s = time.monotonic()
            share = progress.input_bytes / max(progress.total_bytes, 1)
            click.echo(
                f"{share:4.0%}  shards {progress.shards}/{progress.total_shards}  {progress.documents:,} documents"
                f"  {progress.tokens:,} tokens  {progress.bad} bad",
                err=True,
            )

    yield print_line


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from ridgeline.configs.format import format_count

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[bad]} bad"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, tokens="0", bad=0)
        yield lambda progress: bar.update(
            task, total=progress.total_bytes, completed=progress.input_bytes, tokens=format_count(progress.tokens), bad=progress.bad
        )


@contextlib.contextmanager
def evaluation_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback (set, batches done, batches in total) that draws a bar per set on stderr; None if stderr is not a terminal.

    Before the first batch, the time since the begin is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    tasks: dict[str, TaskID] = {}
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        loading: TaskID | None = bars.add_task("loading and compiling", total=None)

        def show(name: str, done: int, total: int) -> None:
            nonlocal loading
            if loading is not None:
                bars.remove_task(loading)
                loading = None
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield show
