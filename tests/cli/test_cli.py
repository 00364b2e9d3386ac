"""The `ridge` command: help, errors as one line, exit codes, and what is not imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RIDGE_DEBUG", raising=False)
    Path("x.yaml").write_text("trainer:\n  steps: 5\n")


def with_command(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    """Make `ridge probe` call a function."""
    module = type(sys)("ridge_probe")
    module.probe = click.command()(function)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ridge_probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("ridge_probe:probe", "A probe."))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("train", "evaluate", "generate", "data", "config", "shardings", "convert"):
        assert f"\n  {name} " in shown
    assert cli.run(["data", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("prepare", "train-tokenizer", "inspect", "bench"):
        assert f"\n  {name} " in shown


def test_ridge_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_show_prints_values_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "x.yaml", "seed=3"]) == 0
    shown = capsys.readouterr().out
    assert "  steps: 5 " in shown
    assert "# x.yaml:2" in shown
    assert "# override 'seed=3'" in shown
    assert cli.run(["config", "show", "x.yaml", "--set", "seed=3"]) == 0
    assert "accumulation" not in capsys.readouterr().out


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "x.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"] == load("x.yaml").config.model_dump(mode="json")
    assert shown["sources"]["trainer.steps"] == "x.yaml:2"


def test_schema_goes_to_stdout_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["properties"]["trainer"]
    assert cli.run(["config", "schema", "-o", "schema.json"]) == 0
    assert Path("schema.json").read_text() == printed
    assert cli.run(["config", "schema", "-o", "no/such/schema.json"]) == 2
    assert capsys.readouterr().err == "ridge: error: no/such/schema.json: cannot be written: No such file or directory\n"


def test_diff_of_files_presets_and_run_directories(capsys: pytest.CaptureFixture[str]) -> None:
    Path("y.yaml").write_text("base: [x]\nseed: 4\n")
    assert cli.run(["config", "diff", "x.yaml", "y.yaml"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["key", "x.yaml", "y.yaml"], ["seed", "0", "4"]]
    assert cli.run(["config", "diff", "x.yaml", "y.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"key": "seed", "a": 0, "b": 4}]
    assert cli.run(["config", "diff", "x.yaml", "x.yaml"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    from ridgeline.configs.dump import to_yaml

    Path("run").mkdir()
    assert cli.run(["config", "diff", "run", "x.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ridge: error: run: ") and "config.yaml" in error and error.count("\n") == 1
    Path("run/config.yaml").write_text(to_yaml(load("y.yaml").config))
    assert cli.run(["config", "diff", "run", "y.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian", "x.yaml"], "unknown command 'trian'; did you mean 'train'?"),
        (["config", "schow"], "unknown command 'schow'; did you mean 'show'? (commands: show, schema, diff) (see 'ridge config --help')"),
        (["config", "show"], "missing argument 'CONFIG' (see 'ridge config show --help')"),
        (["config", "show", "x.yaml", "--jsn"], "no such option '--jsn'; did you mean '--json'? (see 'ridge config show --help')"),
        (["--versoin"], "no such option '--versoin'; did you mean '--version'? (see 'ridge --help')"),
        (["config", "show", "z.yaml"], "config 'z.yaml' not found"),
        (["config", "show", "x.yaml", "trainer.stpes=1"], "override 'trainer.stpes=1': trainer.stpes: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ridge: error: {line}")
    assert captured.err.count("\n") == 1


def test_further_problems_are_listed_in_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "x.yaml", "seed=-1", "trainer.log_every=0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ridge: error: override 'seed=-1': seed: ")
    assert line.endswith(" (and 1 more: override 'trainer.log_every=0': trainer.log_every)")


def test_a_newline_in_an_error_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "no\nsuch.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no\\nsuch.yaml" in line


def test_a_user_error_anywhere_is_one_line_unless_debugging(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise UserError("the disk is full")

    with_command(monkeypatch, probe)
    assert cli.run(["probe"]) == 2
    assert capsys.readouterr().err == "ridge: error: the disk is full\n"
    monkeypatch.setenv("RIDGE_DEBUG", "1")
    with pytest.raises(UserError, match="the disk is full"):
        cli.run(["probe"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise AssertionError("a bug")

    with_command(monkeypatch, probe)
    with pytest.raises(AssertionError, match="a bug"):
        cli.run(["probe"])


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    with_command(monkeypatch, probe)
    assert cli.run(["probe"]) == 130
    assert capsys.readouterr().err == "\nridge: interrupted\n"  # the terminal's ^C stands on the line before


def test_a_command_chooses_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def returns() -> int:
        return 75

    with_command(monkeypatch, returns)
    assert cli.run(["probe"]) == 75
    with_command(monkeypatch, lambda: click.get_current_context().exit(70))
    assert cli.run(["probe"]) == 70
    with pytest.raises(SystemExit) as caught:
        cli.main(["probe"])
    assert caught.value.code == 70


def test_a_reader_that_leaves_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "config", "schema"], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 1


def imported(arguments: list[str]) -> set[str]:
    """Run ridge in a fresh interpreter and return the top-level modules it imported."""
    show = "print('\\n@' + ' '.join({m.partition('.')[0] for m in sys.modules}))"
    code = f"import sys; from ridgeline.cli import main as c; c.run({arguments!r}); {show}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(done.stdout.rpartition("@")[2].split())


HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "tokenizers", "pyarrow", "tensorboardX"}


def test_help_imports_nothing_heavy() -> None:
    assert not imported(["--help"]) & (HEAVY | {"rich", "pydantic", "ruamel", "importlib_metadata"})
    assert not imported(["data", "--help"]) & (HEAVY | {"rich", "pydantic", "ruamel"})


def test_showing_a_config_imports_no_jax() -> None:
    modules = imported(["config", "show", "models/llama-3.2-1b", "mesh.fsdp=8"])
    assert "pydantic" in modules
    assert not modules & (HEAVY | {"rich"})


def test_every_command_in_the_table_exists() -> None:
    def check(table: cli.Table, path: str) -> None:
        for name, entry in table.items():
            if isinstance(entry[1], dict):
                check(entry[1], f"{path} {name}")
            else:
                module, _, attribute = entry[0].partition(":")
                command = getattr(importlib.import_module(module), attribute)
                assert isinstance(command, click.Command), f"{path} {name}"
                assert command.help, f"{path} {name}"

    check(cli.COMMANDS, "ridge")


def test_python_m_launch_is_ridge() -> None:
    done = subprocess.run([sys.executable, "-m", "ridgeline", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ridgeline ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("config", "show", "models/gpt2", "trainer.st"), {"trainer.steps=", "trainer.stop_after_s="}),
        (("train", "models/gpt2", "seed=1", "optimizer.cl"), {"optimizer.clip_norm="}),
        (("config", "show", "models/qwen2-72"), {"models/qwen2-72b", "models/qwen2-72"}),  # the last one: files, by the shell
    ],
)
def test_the_shell_completes_configs_and_keys(typed: tuple[str, ...], offered: set[str]) -> None:
    from click.shell_completion import ShellComplete

    from ridgeline.cli.main import ridge

    found = ShellComplete(ridge, {}, "ridge", "_RIDGE_COMPLETE").get_completions(list(typed[:-1]), typed[-1])
    assert {item.value for item in found} == offered


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("config", "show", "models/gpt2", "lr=1"), "did you mean 'optimizer.learning_rate'?"),
        (("config", "show", "models/gpt2", "optimizer.lr=1"), "did you mean 'learning_rate'?"),
        (("config", "show", "models/gpt2", "trainer.global_batch_size=8"), "did you mean 'data.batch_size'?"),
        (("config", "show", "models/gpt2", "model.n_embd=8"), "did you mean 'embed_dim'?"),
        (("train", "models/gpt2", "--trainer.steps=5"), "trainer.steps=VALUE"),
        (("train", "models/gpt2", "--max-steps", "5"), "trainer.steps=VALUE"),
        (("train", "models/gpt2", "--grad_clip=1"), "optimizer.clip_norm=VALUE"),
        (("plan", "models/gpt2", "--jsn"), "'--json'"),
    ],
)
def test_names_of_other_trainers_are_understood(arguments: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.cli.main import run

    assert run(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_every_foreign_name_stands_for_a_key() -> None:
    from ridgeline.configs.fields import schema_keys
    from ridgeline.configs.foreign_names import FOREIGN_NAMES

    assert set(FOREIGN_NAMES.values()) <= {key for key, _ in schema_keys()}
