"""`ridge train CONFIG [key=value ...]`: train a model, or resume a run."""

from __future__ import annotations

import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ridgeline.cli.options import MEMBERS, Int32Range, complete_config, complete_key
from ridgeline.configs.environment import shortened
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch import cluster, environment, exit_codes
from ridgeline.launch.slurm.state import job_has_ended
from ridgeline.trainer.stop import Stop, StopRequested

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.trainer.loop import Outcome

GRACE = "RIDGE_GRACE_S"
"""Environment variable set by the job script: seconds between the stop signal and the end of the job."""
LINGER_S = 3.0
"""Process 0 runs the coordination service and exits last, so that peers do not mistake its exit for a crash."""
_COLLECT = (700, 10, 10)
"""Objects between two collections of garbage during a run, as Python sets it: what holds memory of devices is freed soon."""


SUMMARY_LOG_BYTES = 64 << 20
"""Most of event logs that a run reads at its end, while it still holds its nodes: 0.4 s and 15 MB of memory for each MB."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path), shell_complete=complete_config)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option("--coordinator", metavar="HOST:PORT", help="Address of process 0, if there is no launcher.")
@click.option("--processes", type=MEMBERS, help="Number of processes, if there is no launcher.")
@click.option("--process", type=Int32Range(), help="Index of this process, if there is no launcher.")
@click.option(
    "--from-step",
    type=Int32Range(),
    metavar="N",
    help="Restart from the checkpoint of step N. Later ones are set aside, not deleted.",
)
def train(
    config: Path, overrides: tuple[str, ...], coordinator: str | None, processes: int | None, process: int | None, from_step: int | None
) -> None:
    """Train a model: start a run, or resume the one in its run directory.

    CONFIG is a YAML file, or the name of a shipped config. An override is section.key=value, such as trainer.steps=200 or mesh.fsdp=4.
    Under srun, mpirun, torchrun or a Kubernetes indexed job, the processes find each other automatically. Ctrl-C saves and stops; the same
    command resumes.
    """
    stop = Stop().install()
    resolved = load(config, overrides)
    here = cluster.describe(os.environ, flags=cluster.Flags(coordinator, processes, process), platform=resolved.config.runtime.platform)
    settings = environment.prepare(resolved.config, here)
    if here.process == 0:
        click.echo("\n".join([*cluster.summary(here, resolved.config.runtime), *environment.lines(settings)]))
    joined, link = _join(here, resolved.config, stop)
    with link:
        loading_s = time.monotonic()
        from ridgeline.api import start_facts
        from ridgeline.explain.trace.background import start as start_analysis
        from ridgeline.trainer.failures import CheckpointError, CorruptionFound, NumericalFailure, lost_peer
        from ridgeline.trainer.run import train as run_training

        gc.freeze()  # the collections of a run need not traverse what was loaded: 0.06 s each
        gc.set_threshold(*_COLLECT)  # cli/main.py raised it
        loaded_s = time.monotonic()
        try:
            outcome = run_training(
                resolved.config,
                command=sys.argv,
                before=[*joined.stretches, ("import", loading_s, loaded_s)],
                facts=start_facts(here, joined, settings),
                stop=stop,
                grace_s=_grace_s(),
                analyze=start_analysis,
                from_step=from_step,
                link=link,
                job_ended=job_has_ended,
            )
        except StopRequested as request:
            _leave(_stopped(request.signal.name), here, link)
        except NumericalFailure as error:
            click.echo(f"ridge: stopped: {error}; {_how_to_continue(config, error.steps)}", err=True)
            _end(exit_codes.NUMERICAL_FAILURE, here, link)
        except CorruptionFound as error:
            click.echo(f"ridge: stopped: {error}", err=True)
            _end(exit_codes.CORRUPTION, here, link)
        except CheckpointError as error:
            if (why := lost_peer(error, here.processes)) is not None:  # a save can fail because a peer died, not because of the disk
                link.end_process(why)
            click.echo(f"ridge: stopped: {error}", err=True)
            _end(exit_codes.SAVE_FAILURE, here, link)
        except Exception as error:
            why = lost_peer(error, here.processes) or link.loss
            if why is None:
                raise
            link.end_process(why)
    if outcome is None:
        return
    if here.process == 0:
        report_end(resolved.config.directory.absolute(), outcome)
    _end(exit_codes.DONE if outcome.stopped_by is None else _stopped(outcome.stopped_by.name), here, link)


def _join(here: cluster.Cluster, config: Config, stop: Stop) -> tuple[cluster.Joined, cluster.Link]:
    """Connect to the other processes of the run; exit when that fails or a stop is requested."""
    link = cluster.Link()
    try:
        joined, link = cluster.join(here, config, stop=stop)
        stop.check()
    except StopRequested as request:
        _leave(_stopped(request.signal.name), here, link)
    except cluster.ClusterError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(error.exit_code)
    except cluster.Preempted as error:
        click.echo(f"ridge: stopped: {error}; nothing to save yet", err=True)
        sys.exit(exit_codes.PREEMPTED)
    return joined, link


def report_end(run_dir: Path, outcome: Outcome) -> None:
    """Print where the time of the run went, its main bottleneck, and how to continue."""
    from ridgeline.explain.diagnosis.rules import summary_line
    from ridgeline.explain.summary import format_summary, summarize
    from ridgeline.rundir.events import event_file, event_files, read_events
    from ridgeline.trainer.checkpoint import directories as checkpoint_dirs

    try:
        sizes = [log.stat().st_size for log in event_files(run_dir)]  # of process 0 first
        if sum(sizes[:1]) <= SUMMARY_LOG_BYTES:
            click.echo(format_summary(summarize(read_events(event_file(run_dir, 0)))))
        if sum(sizes) <= SUMMARY_LOG_BYTES:  # the diagnosis reads the logs of all processes
            click.echo(summary_line(run_dir))
        else:
            size = f"{sum(sizes) / 1e6:,.0f} MB of event logs are not read while the run holds its nodes"
            click.echo(f"{size}: ridge goodput {run_dir} has the summary, ridge diagnose {run_dir} the bottleneck")
    except UserError as error:  # a damaged log ends no run
        click.echo(f"no summary: {error}", err=True)
    if not outcome.finished:
        saved = checkpoint_dirs.complete_steps(run_dir / "checkpoints")
        source = f" from step {saved[-1]}" if saved else ""
        click.echo(f"stopped at step {outcome.steps}; run the same command again to resume{source}")


def _how_to_continue(config: Path, steps: Sequence[int]) -> str:
    """Return the command that resumes, the step it resumes from, and the earlier steps."""
    command = f"ridge train {shlex.quote(str(config))}"
    if not steps:
        return f"there is no checkpoint: '{command}' restarts at step 0"
    earlier = f"; to resume from an earlier step: --from-step {' or '.join(map(str, steps[:-1]))}" if len(steps) > 1 else ""
    return f"'{command}' resumes from step {steps[-1]}{earlier}"


def _stopped(name: str) -> int:
    return exit_codes.INTERRUPTED if name == "SIGINT" else exit_codes.PREEMPTED


def _grace_s() -> float | None:
    text = os.environ.get(GRACE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"{GRACE}={shortened(text)} is not a number of seconds")
    return seconds


def _end(code: int, here: cluster.Cluster, link: cluster.Link) -> None:
    """Exit with a code; return for DONE. After a failed save at once: threads of Orbax would hold up the exit."""
    from ridgeline.trainer.checkpoint.payload import waits_after_failure

    if waits_after_failure():
        _leave(code, here, link)
    if code != exit_codes.DONE:
        sys.exit(code)


def _leave(code: int, here: cluster.Cluster, link: cluster.Link) -> NoReturn:
    """Exit immediately: threads may be compiling, and a clean shutdown of jax.distributed would wait for processes that are gone."""
    link.leave(code)
    if here.process == 0 and here.processes > 1:
        time.sleep(LINGER_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
