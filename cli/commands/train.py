"""`ridge train CONFIG [key=value ...]`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch import cluster, environment, exit_codes
from ridgeline.trainer.stop import Stop, StopAsked

if TYPE_CHECKING:
    from ridgeline.trainer.loop import Outcome

GRACE = "RIDGE_GRACE_S"
"""Variable in which a job script says how long a job has to end once it is asked to."""
LINGER_S = 3.0
"""Process 0 holds the coordination service: it leaves last, so that nobody takes its leaving for a failure."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--coordinator", metavar="HOST:PORT", help="Where process 0 listens, if no launcher says it.")
@click.option("--processes", type=int, help="Number of processes of the run, if no launcher says it.")
@click.option("--process", type=int, help="Index of this process, if no launcher says it.")
@click.option("--from-step", type=int, metavar="N", help="Restart from the checkpoint of step N; later ones are set aside, not deleted.")
def train(
    config: Path, overrides: tuple[str, ...], coordinator: str | None, processes: int | None, process: int | None, from_step: int | None
) -> None:
    """Train a model: start a run, or continue the one in its run directory.

    CONFIG is a YAML file; each override is section.key=value, e.g. trainer.steps=200 mesh.fsdp=4.
    Under srun, mpirun, torchrun or a Kubernetes indexed job the processes find each other by themselves.
    Ctrl-C saves and stops; the same command continues.
    """
    stop = Stop().install()
    resolved = load(config, overrides)
    here = cluster.describe(os.environ, flags=cluster.Flags(coordinator, processes, process), platform=resolved.config.runtime.platform)
    settings = environment.prepare(resolved.config, here)
    if here.process == 0:
        click.echo("\n".join([*cluster.explain(here), *environment.lines(settings)]))
    try:
        joined = cluster.join(here, resolved.config, stop=stop)
        stop.check()
    except StopAsked as asked:
        _leave(_stopped(asked.signal.name), here.process, here.processes)
    except cluster.ClusterError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(error.exit_code)
    except cluster.Preempted as error:
        click.echo(f"ridge: stopped: {error}; nothing to save yet", err=True)
        sys.exit(exit_codes.PREEMPTED)

    loading_s = time.monotonic()
    from ridgeline.explain.trace.background import start as start_analysis
    from ridgeline.trainer.checkpoint.checkpointer import CheckpointError
    from ridgeline.trainer.checkpoint.finite import NumericalFailure
    from ridgeline.trainer.peers import lost_peer
    from ridgeline.trainer.run import train as run_training

    loaded_s = time.monotonic()
    try:
        outcome = run_training(
            resolved.config,
            command=sys.argv,
            before=[*joined.stretches, ("import", loading_s, loaded_s)],
            facts={
                "cluster": {"described": asdict(here), "joined": asdict(joined)},
                "environment": {"settings": [asdict(setting) for setting in settings]},
            },
            stop=stop,
            grace_s=_grace_s(),
            analyze=start_analysis,
            from_step=from_step,
        )
    except StopAsked as asked:
        _leave(_stopped(asked.signal.name), here.process, here.processes)
    except NumericalFailure as error:
        click.echo(f"ridge: stopped: {error}; {_how_to_continue(config, error.steps)}", err=True)
        sys.exit(exit_codes.NUMERICAL_FAILURE)
    except CheckpointError as error:
        if (why := lost_peer(error, here.processes)) is not None:  # a save that failed because a process went is no failure of the disk
            _lost(why)
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(exit_codes.SAVE_FAILURE)
    except Exception as error:
        why = lost_peer(error, here.processes)
        if why is None:
            raise
        _lost(why)
    if outcome is None:
        return
    if here.process == 0:
        _report(resolved.config.directory, outcome)
    if outcome.stopped_by is not None:
        sys.exit(_stopped(outcome.stopped_by.name))


def _report(run_dir: Path, outcome: Outcome) -> None:
    """Print the end of a run: where the time went, what held it back most, and how to go on."""
    from ridgeline.explain.diagnosis.last_word import last_word
    from ridgeline.explain.summary import format_summary, summarize
    from ridgeline.rundir.events import event_file, read_events

    click.echo(format_summary(summarize(read_events(event_file(run_dir, 0)))))
    click.echo(last_word(run_dir))
    if not outcome.finished:
        click.echo(f"stopped at step {outcome.steps}; run the same command again to continue")


def _lost(why: str) -> NoReturn:
    click.echo(f"ridge: stopped: {why}; the last good checkpoint is intact", err=True)
    _leave(exit_codes.LOST_PEER, 1, 1)


def _how_to_continue(config: Path, steps: Sequence[int]) -> str:
    """Name the step that a restart takes, and the earlier ones to choose from."""
    command = f"ridge train {shlex.quote(str(config))}"
    if not steps:
        return f"there is no checkpoint: '{command}' starts at step 0"
    earlier = f"; with --from-step N from {', '.join(map(str, steps[:-1]))}" if len(steps) > 1 else ""
    return f"'{command}' continues from step {steps[-1]}{earlier}"


def _stopped(name: str) -> int:
    return exit_codes.INTERRUPTED if name == "SIGINT" else exit_codes.PREEMPTED


def _grace_s() -> float | None:
    text = os.environ.get(GRACE)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{GRACE}={text} is not a number of seconds") from None


def _leave(code: int, process: int, processes: int) -> NoReturn:
    """End at once: threads may be inside a compiler, and jax.distributed's own farewell would wait for processes that are gone."""
    if process == 0 and processes > 1:
        time.sleep(LINGER_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
