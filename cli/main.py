"""The `ridge` command: one table of subcommands, each imported only when it is called, and one place for errors.

Every error a user can cause ends as one line on stderr and exit code 2; RIDGE_DEBUG=1 shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from ridgeline.configs.errors import UserError, nearest
from ridgeline.launch.exit_codes import DONE, INTERRUPTED, USAGE

Table = dict[str, "tuple[str, str] | tuple[str, Table]"]

_DATA: Table = {
    "prepare": ("ridgeline.cli.commands.data_prepare:prepare", "Tokenise text into a corpus of token files."),
    "train-tokenizer": ("ridgeline.cli.commands.data_prepare:train_tokenizer", "Train a BPE tokenizer on text."),
    "inspect": ("ridgeline.cli.commands.data:inspect", "Show a corpus: counts, shards, sample rows."),
    "bench": ("ridgeline.cli.commands.data:bench", "Measure tokens/s and waiting time of the loader."),
}
_CONFIG: Table = {
    "show": ("ridgeline.cli.commands.config:show", "The resolved config, with where each value came from."),
    "schema": ("ridgeline.cli.commands.config:schema", "JSON Schema of a config, for editors."),
    "diff": ("ridgeline.cli.commands.config:diff", "What differs between two configs."),
}
_CONVERT: Table = {
    "from-hf": ("ridgeline.cli.commands.convert:from_hf", "Import a Hugging Face directory as a checkpoint."),
    "to-hf": ("ridgeline.cli.commands.convert:to_hf", "Export a run as a Hugging Face directory."),
}
_ESTIMATE: Table = {
    "model": ("ridgeline.cli.commands.estimate_config:model", "Parameters and FLOPs per token of a config, by component."),
    "memory": ("ridgeline.cli.commands.estimate_config:memory", "Memory of one device, by component."),
    "step": ("ridgeline.cli.commands.estimate_config:step", "Time of a training step, by ceiling."),
    "collective": ("ridgeline.cli.commands.estimate:collective", "Time of one collective (alpha-beta model)."),
    "run": ("ridgeline.cli.commands.estimate:run", "Days, device-hours and money of a run, or its MFU."),
    "pipeline": ("ridgeline.cli.commands.estimate:pipeline", "Step time and bubble of a pipeline."),
    "checkpoint": ("ridgeline.cli.commands.estimate:checkpoint", "Best checkpoint interval for a failure rate."),
    "ridge": ("ridgeline.cli.commands.estimate:ridge", "Where computing and moving balance."),
    "batch": ("ridgeline.cli.commands.estimate:batch", "Steps by batch size; the critical batch size."),
}
_BENCH: Table = {
    "matmul": ("ridgeline.cli.commands.bench:matmul", "The matrix products of the model alone."),
    "memory": ("ridgeline.cli.commands.bench:memory", "Device memory bandwidth, and what a step moves."),
    "collectives": ("ridgeline.cli.commands.bench:collectives", "The collectives of a step over the mesh axes, alone."),
    "loader": ("ridgeline.cli.commands.bench:loader", "The loader alone on the real data."),
    "step": ("ridgeline.cli.commands.bench:step", "The compiled step on synthetic data."),
    "loop": ("ridgeline.cli.commands.bench:loop", "The training loop on real data."),
    "checkpoint": ("ridgeline.cli.commands.bench:checkpoint", "Saves and restores of the whole state."),
    "remat": ("ridgeline.cli.commands.bench_remat:remat", "What each rematerialisation policy costs, for ridge plan."),
    "all": ("ridgeline.cli.commands.bench:all_layers", "The ladder: what each layer adds, and which to look at."),
    "compare": ("ridgeline.cli.commands.bench_compare:compare", "Stored results: faster, slower, or cannot tell."),
    "template": ("ridgeline.cli.commands.bench_compare:template", "An experiment for the lab notebook."),
    "sweep": ("ridgeline.cli.commands.bench_sweep:sweep", "Batch sizes or remat policies side by side."),
}
COMMANDS: Table = {
    "plan": ("ridgeline.cli.commands.plan:plan", "What a run should cost: layouts, memory, time, money, what binds."),
    "train": ("ridgeline.cli.commands.train:train", "Train a model from a config; the same command resumes a run."),
    "launch": ("ridgeline.cli.commands.launch:launch", "Train with several processes on this machine, without Slurm."),
    "doctor": ("ridgeline.cli.commands.doctor:doctor", "Examine this machine, or every node of a job, before training."),
    "submit": ("ridgeline.cli.commands.submit:submit", "Submit a training run as a Slurm job."),
    "status": ("ridgeline.cli.commands.status:status", "State of a run's jobs, and how far training is."),
    "logs": ("ridgeline.cli.commands.logs:logs", "Print or follow the log of a run's job."),
    "cancel": ("ridgeline.cli.commands.cancel:cancel", "Cancel a run's jobs; a running one saves first."),
    "sweep": ("ridgeline.cli.commands.sweep:sweep", "Train a grid or list of configs as a job array; a table of results."),
    "submit-data": ("ridgeline.cli.commands.submit_data:submit_data", "Prepare a corpus as a job array."),
    "evaluate": ("ridgeline.cli.commands.evaluate:evaluate", "Loss, perplexity and bits per byte of a run or model."),
    "generate": ("ridgeline.cli.commands.generate:generate", "Sample text from a run or a Hugging Face model."),
    "estimate": ("Calculators: what a model, a step or a run takes, each with its formula.", _ESTIMATE),
    "calibrate": ("ridgeline.cli.commands.calibrate:calibrate", "Measure this machine for the planner."),
    "bench": ("Measure one layer of the stack at a time; compare with stored results.", _BENCH),
    "data": ("Prepare, look at and time training data.", _DATA),
    "config": ("Show, compare and describe configs.", _CONFIG),
    "compile": ("ridgeline.cli.commands.compile:compile_command", "Compile the train step for GPUs that are not here."),
    "analyze": ("ridgeline.cli.commands.analyze:analyze_command", "Where the time of a step went: read a captured profile."),
    "goodput": ("ridgeline.cli.commands.goodput:goodput", "Where the wall time and the money of a run went."),
    "diagnose": ("ridgeline.cli.commands.diagnose:diagnose", "What holds a run back, with evidence, and what to do."),
    "report": ("ridgeline.cli.commands.report:report", "One HTML page about a run, or several side by side."),
    "scale": ("ridgeline.cli.commands.scale:scale", "The same work at several scales, and where to stop."),
    "timeline": ("ridgeline.cli.commands.timeline:timeline", "A run's phases as a picture or a Perfetto trace."),
    "shardings": ("ridgeline.cli.commands.shardings:shardings", "How every parameter is divided over the devices."),
    "convert": ("Convert models from and to Hugging Face.", _CONVERT),
}
"""Command -> ("module:attribute", help line), or group -> (help line, its own table)."""


class LazyGroup(click.Group):
    """A group that knows names and help lines from a table and imports a command's module only to run it."""

    def __init__(self, name: str, table: Table, help: str, **kwargs: object) -> None:
        super().__init__(name, help=help, no_args_is_help=True, **kwargs)  # type: ignore[arg-type]
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or build one group."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        if isinstance(entry[1], dict):
            return LazyGroup(cmd_name, entry[1], entry[0])
        module, _, attribute = entry[0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest name."""
        name = args[0]
        if name not in self.table and not name.startswith("-"):
            close = nearest(name, self.table)
            hint = f"; did you mean '{close}'?" if close else ""
            raise click.UsageError(f"unknown command '{name}'{hint} (commands: {', '.join(self.table)})", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = [(name, entry[0] if isinstance(entry[1], dict) else entry[1]) for name, entry in self.table.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"ridgeline {version('ridgeline')}")
        ctx.exit()


ridge = LazyGroup(
    "ridge",
    COMMANDS,
    "Train language models on GPU clusters, with every second accounted for.",
    params=[
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version.")
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `ridge` and exit. A command's integer return value is the exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run `ridge` with these arguments and return the exit code (see launch/exit_codes.py)."""
    try:
        result = ridge.main(list(arguments), prog_name="ridge", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Point stdout elsewhere so that the interpreter's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as click does when the pipe breaks inside a command
    except (KeyboardInterrupt, click.Abort):
        print("ridge: interrupted", file=sys.stderr)
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        _print_error(_click_message(error))
        return USAGE
    except UserError as error:
        if os.environ.get("RIDGE_DEBUG") == "1":
            raise
        _print_error(str(error))
        return USAGE


def _click_message(error: click.ClickException) -> str:
    """Return click's own complaint in our one-line form, with where to read more."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        message = f"no such option '{error.option_name}'"
        if error.possibilities:
            message += f"; did you mean '{sorted(error.possibilities)[0]}'?"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message[:1].lower()}{message[1:]} (see '{error.ctx.command_path} --help')"
    return message


def _print_error(message: str) -> None:
    first, *more = message.splitlines() or [""]
    print("\n".join([f"ridge: error: {first}", *(f"  {line}" for line in more)]), file=sys.stderr)
