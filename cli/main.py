"""The `ridge` command: one table of commands, each imported only when it is called, and the handling of errors.

An error that a user can cause is one line on stderr, with exit code 2. RIDGE_DEBUG=1 shows its traceback.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

import click

from ridgeline.cli.fitted import fit_stdout, fitted
from ridgeline.configs.errors import UserError, nearest, printable
from ridgeline.launch.cuda_plugin import hide_unusable_cuda_plugin
from ridgeline.launch.exit_codes import DONE, INTERRUPTED, PREEMPTED, USAGE

LOADING = 50_000
"""Objects between two collections of garbage. The modules that train make 220,000 objects that stay; with Python's default of 700
they are traversed again and again, which takes a fifth of the CPU time of a start."""
CHOOSING_FLAGS = {"train", "launch", "doctor"}
"""Commands that choose XLA's flags, and leave out and name those that jaxlib does not support."""
MAX_LINE = 1000
"""Most characters of a line of an error message."""

Table = dict[str, "tuple[str, str] | tuple[str, Table]"]

_DATA: Table = {
    "prepare": ("ridgeline.cli.commands.data_prepare:prepare", "Tokenize text into a corpus of token files."),
    "train-tokenizer": ("ridgeline.cli.commands.data_prepare:train_tokenizer", "Train a BPE tokenizer on text."),
    "teacher": ("ridgeline.cli.commands.data_teacher:teacher", "Store a teacher's predictions of a corpus, for distillation."),
    "inspect": ("ridgeline.cli.commands.data:inspect", "Show a corpus: counts, shards, sample rows."),
    "bench": ("ridgeline.cli.commands.data:bench", "Time the loader: tokens/s and data wait."),
}
_CONFIG: Table = {
    "show": ("ridgeline.cli.commands.config:show", "Print the resolved config with the origin of each value."),
    "schema": ("ridgeline.cli.commands.config:schema", "Print the JSON Schema of a config, for editors."),
    "diff": ("ridgeline.cli.commands.config:diff", "Print the differences between two configs."),
}
_CONVERT: Table = {
    "from-hf": ("ridgeline.cli.commands.convert:from_hf", "Import a Hugging Face directory as a checkpoint."),
    "to-hf": ("ridgeline.cli.commands.convert:to_hf", "Export a run as a Hugging Face directory."),
    "upcycle": ("ridgeline.cli.commands.convert:upcycle", "Make a model with experts from a dense one."),
}
_CHECKPOINT: Table = {
    "list": ("ridgeline.cli.commands.checkpoint:list_command", "List the checkpoints of a run."),
    "verify": ("ridgeline.cli.commands.checkpoint:verify_command", "Compare the checkpoints of a run with their checksums."),
    "diff": ("ridgeline.cli.commands.checkpoint:diff_command", "Compare two checkpoints: arrays, data position, config."),
    "repair": ("ridgeline.cli.commands.checkpoint_change:repair", "Clear leftovers, restore damaged files, set aside what is lost."),
    "prune": ("ridgeline.cli.commands.checkpoint_change:prune", "Delete checkpoints that the retention policy does not keep."),
    "copy": ("ridgeline.cli.commands.checkpoint_change:copy", "Copy checkpoints to an object store, or back."),
}
_DEBUG: Table = {
    "nan": ("ridgeline.cli.commands.debug:nan", "Find the layer and operation that first gave NaN or infinity."),
}
_ESTIMATE: Table = {
    "model": ("ridgeline.cli.commands.estimate_config:model", "Parameters and FLOPs per token of a config, by component."),
    "memory": ("ridgeline.cli.commands.estimate_config:memory", "Memory of one device, by component."),
    "step": ("ridgeline.cli.commands.estimate_config:step", "Time of a train step, by limiting resource."),
    "collective": ("ridgeline.cli.commands.estimate_collective:collective", "Time of one collective (alpha-beta model)."),
    "run": ("ridgeline.cli.commands.estimate_run:run", "Duration, device-hours and cost of a run, or its MFU."),
    "budget": ("ridgeline.cli.commands.estimate_run:budget", "Model size and tokens that a budget buys."),
    "pipeline": ("ridgeline.cli.commands.estimate_run:pipeline", "Step time and bubble of a pipeline."),
    "checkpoint": ("ridgeline.cli.commands.estimate_run:checkpoint", "Optimal checkpoint interval for a failure rate."),
    "ridge": ("ridgeline.cli.commands.estimate_run:ridge", "Balance of compute and communication (roofline)."),
    "batch": ("ridgeline.cli.commands.estimate_run:batch", "Steps by batch size, and the critical batch size."),
}
_BENCH: Table = {
    "matmul": ("ridgeline.cli.commands.bench:matmul", "The matmuls of a step alone."),
    "memory": ("ridgeline.cli.commands.bench:memory", "The device memory traffic of a step alone."),
    "collectives": ("ridgeline.cli.commands.bench:collectives", "The collectives of a step alone."),
    "loader": ("ridgeline.cli.commands.bench:loader", "The data loader alone."),
    "step": ("ridgeline.cli.commands.bench:step", "The compiled train step on synthetic data."),
    "loop": ("ridgeline.cli.commands.bench:loop", "The training loop on real data."),
    "checkpoint": ("ridgeline.cli.commands.bench:checkpoint", "Saves and restores of the training state."),
    "remat": ("ridgeline.cli.commands.bench_remat:remat", "The cost of each rematerialization policy, for ridge plan."),
    "all": ("ridgeline.cli.commands.bench:all_layers", "All layers: how much each adds to a step."),
    "compare": ("ridgeline.cli.commands.bench_compare:compare", "Compare stored results: faster, slower, or cannot tell."),
    "template": ("ridgeline.cli.commands.bench_compare:template", "Write a lab-notebook section for an experiment."),
    "sweep": ("ridgeline.cli.commands.bench_sweep:sweep", "Compare batch sizes or other values of one setting."),
}
COMMANDS: Table = {
    "init": ("ridgeline.cli.commands.init:init", "Write a commented config for a model, a corpus and a cluster."),
    "plan": ("ridgeline.cli.commands.plan:plan", "Find the best layout: memory, step time, cost, bottleneck."),
    "simulate": ("ridgeline.cli.commands.simulate:simulate", "Simulate a campaign: failures, restarts, checkpoints, spares."),
    "train": ("ridgeline.cli.commands.train:train", "Train a model; the same command resumes a run."),
    "launch": ("ridgeline.cli.commands.launch:launch", "Train with several processes on this machine."),
    "doctor": ("ridgeline.cli.commands.doctor:doctor", "Check this machine, or all nodes of a job, before training."),
    "submit": ("ridgeline.cli.commands.submit:submit", "Submit a training run as a Slurm job."),
    "runs": ("ridgeline.cli.commands.runs:runs", "List runs: state, step, loss, speed, age."),
    "status": ("ridgeline.cli.commands.status:status", "Show whether a run or its Slurm jobs are running, and its progress."),
    "logs": ("ridgeline.cli.commands.logs:logs", "Print or follow the log of a run."),
    "cancel": ("ridgeline.cli.commands.cancel:cancel", "Stop a run or its Slurm jobs; a running one saves first."),
    "sweep": ("ridgeline.cli.commands.sweep:sweep", "Train a grid or list of configs, through Slurm or on this machine."),
    "submit-data": ("ridgeline.cli.commands.submit_data:submit_data", "Prepare a corpus as a Slurm job array."),
    "checkpoint": ("List, verify, compare, repair, prune and copy the checkpoints of a run.", _CHECKPOINT),
    "evaluate": ("ridgeline.cli.commands.evaluate:evaluate", "Compute loss, perplexity and bits per byte of a model."),
    "generate": ("ridgeline.cli.commands.generate:generate", "Sample text from a model."),
    "estimate": ("Calculate parameters, memory, step time, cost and more, with formulas.", _ESTIMATE),
    "calibrate": ("ridgeline.cli.commands.calibrate:calibrate", "Measure this machine for the planner."),
    "bench": ("Time one layer of the stack at a time; compare with stored results.", _BENCH),
    "data": ("Prepare, inspect and time training data.", _DATA),
    "config": ("Print, describe and compare configs.", _CONFIG),
    "compile": ("ridgeline.cli.commands.compile:compile_command", "Compile the train step for a cluster's GPUs, without a GPU."),
    "analyze": ("ridgeline.cli.commands.analyze:analyze_command", "Show where the time of a step goes, from a captured profile."),
    "goodput": ("ridgeline.cli.commands.goodput:goodput", "Show where the wall time and the cost of a run went."),
    "diagnose": ("ridgeline.cli.commands.diagnose:diagnose", "Report the bottlenecks of a run, and what to change."),
    "debug": ("Find the cause of what went wrong in a run.", _DEBUG),
    "report": ("ridgeline.cli.commands.report:report", "Write an HTML page about a run, or a comparison of several."),
    "scale": ("ridgeline.cli.commands.scale:scale", "Measure a config at several scales, and recommend one."),
    "ladder": ("ridgeline.cli.commands.ladder:ladder", "Train several sizes, fit a scaling law, predict a target."),
    "timeline": ("ridgeline.cli.commands.timeline:timeline", "Draw the phases of a run, or export a Perfetto trace."),
    "shardings": ("ridgeline.cli.commands.shardings:shardings", "Show the sharding of every parameter, without the hardware."),
    "convert": ("Convert models: from and to Hugging Face, dense to experts.", _CONVERT),
}
"""Command -> ("module:attribute", help line), or group -> (help line, its own table)."""


class LazyGroup(click.Group):
    """A group that takes names and help lines from a table, and imports the module of a command only to run it."""

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
        """Resolve a command. Raises UsageError with the nearest name for an unknown one."""
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
        from ridgeline.rundir.provenance import own_version

        click.echo(f"ridgeline {own_version()}")
        ctx.exit()


ridge = LazyGroup(
    "ridge",
    COMMANDS,
    "Plan, train and analyze language models on GPU clusters.",
    params=[
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version.")
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `ridge` and exit. A command's integer return value is the exit code."""
    gc.set_threshold(LOADING, *gc.get_threshold()[1:])
    hide_unusable_cuda_plugin()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["train"]:
        signal.signal(signal.SIGTERM, _stop_early)
    fit_stdout(words)
    sys.exit(run(words))


def run(arguments: Sequence[str]) -> int:
    """Run `ridge` with these arguments and return the exit code (see launch/exit_codes.py)."""
    try:
        if flags := os.environ.get("XLA_FLAGS"):
            from ridgeline.launch.xla_flags import check_supported  # a third of the time of a start

            check_supported(flags, unknown_too=not set(arguments[:1]) & CHOOSING_FLAGS)
        result = ridge.main(list(arguments), prog_name="ridge", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except BrokenPipeError:
        # The reader (such as `| head`) is done. Redirect stdout so that the interpreter's final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as click does for a broken pipe inside a command
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
    except (ValueError, RuntimeError, AssertionError) as error:
        message = _jax_message(error)
        if message is None or os.environ.get("RIDGE_DEBUG") == "1":
            raise
        _print_error(message)
        return USAGE
    except OSError as error:
        if error.filename is None or os.environ.get("RIDGE_DEBUG") == "1":
            raise
        _print_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return USAGE


def _jax_message(error: Exception) -> str | None:
    """Return one line for an error of JAX about its environment: a variable that it does not accept, no such devices; else None."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = None if last is None else last.tb_frame.f_globals.get("__name__")
    reason = " ".join(str(error).split())[:300]
    names = ", ".join(sorted(name for name in os.environ if name.startswith("JAX_")))
    if module == "jax._src.config" and isinstance(error, ValueError) and names:
        return f"JAX does not accept one of these environment variables: {names}: {reason}"
    if module == "jax._src.xla_bridge" and not isinstance(error, ValueError):
        wanted = sys.modules["jax"].config.values["jax_platforms"]
        return f"JAX cannot start the platform '{wanted}' (runtime.platform, or JAX_PLATFORMS): {reason or 'no such device here'}"
    return None


def _stop_early(number: int, frame: types.FrameType | None) -> NoReturn:
    """SIGTERM while `ridge train` is still loading its modules: there is nothing to save. trainer.stop.Stop replaces this handler."""
    print("ridge: stopped: received SIGTERM; nothing to save yet", file=sys.stderr, flush=True)
    os._exit(PREEMPTED)


def _click_message(error: click.ClickException) -> str:
    """Return click's error as one line, with the help command."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        message = f"no such option '{error.option_name}'"
        hint = _setting_hint(error)
        if hint is not None:
            message += hint
        elif error.possibilities:
            message += f"; did you mean '{sorted(error.possibilities)[0]}'?"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message[:1].lower()}{message[1:]} (see '{error.ctx.command_path} --help')"
    return message


def _setting_hint(error: click.NoSuchOption) -> str | None:
    """Return what to type when a config key was given as an option, as other trainers take them; None for a command without a config."""
    if error.ctx is None or not any(parameter.name == "overrides" for parameter in error.ctx.command.params):
        return None
    from ridgeline.configs.fields import suggested_key

    name, equals, value = error.option_name.lstrip("-").partition("=")
    key = suggested_key(name)
    return None if key is None else f"; a config key has no dashes: {key}={value if equals else 'VALUE'}"


def _print_error(message: str) -> None:
    line = f"ridge: error: {printable(message, MAX_LINE)}"  # it may quote a damaged file
    print(fitted(line, shutil.get_terminal_size().columns) if sys.stderr.isatty() else line, file=sys.stderr)
