"""What a user can get wrong, end to end: one line on stderr that names it, exit code 2, nothing lost, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from ridgeline.cli.data_options import parse_slice
from ridgeline.cli.main import ridge, run
from ridgeline.configs.environment import MOST
from ridgeline.configs.errors import UserError
from ridgeline.launch.exit_codes import DONE, USAGE
from ridgeline.launch.slurm.logs import of_rank
from ridgeline.launch.slurm.units import parse_memory_bytes, parse_time_s
from ridgeline.loaders.prepare import PrepareSettings, prepare

Write = Callable[..., str]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small corpora of byte tokens and one of another tokenizer."""
    from ridgeline.loaders.train_tokenizer import TokenizerSettings, train_tokenizer

    directory = tmp_path_factory.mktemp("corpora")
    texts = directory / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"text number {number}\n" * 40)
    tokenizer = directory / "tokenizer.json"
    train_tokenizer(TokenizerSettings((texts,), tokenizer, 300))
    prepare(PrepareSettings((texts,), directory / "bytes", "bytes"), workers=1)
    prepare(PrepareSettings((texts,), directory / "bpe", str(tokenizer)), workers=1)
    return directory


@pytest.fixture
def write(tmp_path: Path, corpora: Path) -> Write:
    """Write a config that is right but for the given sections; return its path."""

    def make(**sections: object) -> str:
        content: dict[str, object] = {
            "name": "bad",
            "run_dir": str(tmp_path / "run"),
            "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 32},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpora / "bytes")}], "seq_len": 32, "batch_size": 8},
            "trainer": {"steps": 2, "log_every": 1},
            "logging": {"tensorboard": False},
        }
        for name, values in sections.items():
            old = content.get(name)
            content[name] = {**old, **values} if isinstance(old, dict) and isinstance(values, dict) else values
        file = tmp_path / "config.yaml"
        with file.open("w") as stream:
            YAML().dump(content, stream)
        return str(file)

    return make


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Run the command; return its error line after checking its form."""
    capsys.readouterr()
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert code == USAGE, captured.out + captured.err
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("ridge: error: ")
    assert "Traceback" not in captured.err
    return lines[0]


OVERRIDES = [
    ("trainer.stpes=3", "did you mean 'steps'"),
    ("trainer.steps=many", "trainer.steps"),
    ("trainer.steps=-1", "trainer.steps"),
    ("optimizer.learning_rate=-1", "optimizer.learning_rate"),
    ("optimizer.learning_rate=.nan", "optimizer.learning_rate"),
    ("mesh.fsdp=4", "mesh"),
    ("model.num_heads=3", "num_heads"),
    ("data.batch_size=6", "data.batch_size"),
    ("trainer.accumulation=3", "accumulation"),
    ("data.seq_len=64", "seq_len"),
    ("data.train=[{path: nowhere}]", "nowhere"),
    ("data.train=[]", "data.train is empty"),
    ("evaluation.sets={held: nowhere}", "nowhere"),
    ("model.vocab_size=100", "model.vocab_size"),
    ("model.family=lama", "did you mean 'llama'"),
    ("compute.attention.backend=flash_attention", "backend"),
    ("compute.attention.backend=cudnn", "cudnn"),
    ("compute.remat.policy=ful", "did you mean 'full'"),
    ("optimizer.kind=adam", "did you mean 'adamw'"),
    ("schedule.kind=cosin", "did you mean 'cosine'"),
    ("precision.compute=float8", "precision.compute"),
    ("precision.compute=float16", "loss scaling"),
    ("run_dir=/proc/no", "/proc/no"),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_bad_setting_is_named_before_anything_is_made(
    override: str, expected: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert expected in refused(capsys, "train", write(), override)
    assert not (tmp_path / "run").exists()


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture) -> None:
    assert "nowhere.yaml" in refused(capsys, "train", "nowhere.yaml")


def test_corpora_of_different_tokenizers_are_refused(write: Write, corpora: Path, capsys: pytest.CaptureFixture) -> None:
    both = [{"path": str(corpora / name)} for name in ("bytes", "bpe")]
    assert "tokenizer" in refused(capsys, "train", write(data={"train": both}, model={"vocab_size": 300}))
    held = {"sets": {"held": str(corpora / "bpe")}}
    assert "tokenizer" in refused(capsys, "train", write(evaluation=held, model={"vocab_size": 300}))


def test_a_corrupt_shard_is_named(write: Write, corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpora / "bytes", copy)
    (shard,) = copy.glob("*.array_record")
    data = bytearray(shard.read_bytes())
    stored = [place for place, byte in enumerate(data) if byte]  # a small shard is mostly block padding
    data[stored[len(stored) // 2]] ^= 0x10
    shard.write_bytes(data)
    assert shard.name in refused(capsys, "train", write(data={"train": [{"path": str(copy)}]}))
    shard.unlink()
    assert shard.name in refused(capsys, "train", write(data={"train": [{"path": str(copy)}]}))


def test_directories_of_others_are_left_alone(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    foreign = tmp_path / "run"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert "thesis.tex" in refused(capsys, "train", write())
    assert (foreign / "thesis.tex").read_text() == "mine"
    assert sorted(p.name for p in foreign.iterdir()) == ["thesis.tex"]
    assert "no model" in refused(capsys, "evaluate", str(foreign))
    assert "no model" in refused(capsys, "generate", str(foreign), "--prompt", "x")


def test_a_run_is_not_continued_as_another_nor_from_damage(
    write: Write, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture
) -> None:
    fits_both = {"vocab_size": 300}
    assert run(["train", write(model=fits_both)]) == DONE
    assert "belongs to the run 'bad'" in refused(capsys, "train", write(name="other"))
    more = ["trainer.steps=4", "model.vocab_size=300"]
    assert "model.mlp_dim" in refused(capsys, "train", write(model={"mlp_dim": 64}), *more)
    assert "optimizer.kind" in refused(capsys, "train", write(), *more, "optimizer.kind=lion")
    others = {"train": [{"path": str(corpora / "bpe")}]}
    assert "the data's tokenizer" in refused(capsys, "train", write(data=others), *more)
    steps = tmp_path / "run" / "checkpoints"
    (step,) = steps.glob("step_*")
    payload = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    assert payload.name in refused(capsys, "train", write(), *more)
    assert [p.name for p in steps.iterdir() if p.name.startswith(step.name)] != [step.name]


def test_hugging_face_directories_with_missing_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    source = tmp_path / "hf"
    source.mkdir()
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 10,
        "n_positions": 8,
        "n_embd": 4,
        "n_layer": 1,
        "n_head": 2,
    }
    (source / "config.json").write_text(json.dumps(fields))
    save_file({"transformer.wte.weight": np.zeros((10, 4), np.float32)}, source / "model.safetensors")
    assert "wpe" in refused(capsys, "convert", "from-hf", str(source), "--output", str(tmp_path / "out"))


def commands(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name), command


COUNTED = ("nodes", "devices", "processes", "slices", "target_nodes")
"""Options for which time and memory grow with the number."""
HUGE = ["9" * 20, "9" * 5000, "1-" + "9" * 20, "1-" + "9" * 5000, "1,2," + "9" * 20, "²", "1-²", "-", "1-", ""]


def test_huge_numbers_of_nodes_devices_and_processes_are_refused_at_once(capsys: pytest.CaptureFixture) -> None:
    bounded = set()
    for words, command in commands(ridge):
        for option in command.params:
            if option.name in COUNTED and isinstance(option.type, click.IntRange):
                bounded.add((*words, option.name))
                assert option.type.max is not None and option.type.max <= MOST, (words, option.name)
    assert {words[0] for words in bounded} >= {"simulate", "submit", "compile", "launch", "train", "doctor"}
    begin_s = time.thread_time()
    for number in HUGE:
        for arguments in (
            ["plan", "models/llama-3.2-1b", "--cluster", "dgx-h100", "--nodes", number],
            ["simulate", "models/llama-3.2-1b", "--cluster", "dgx-h100", "--days", "1", "--nodes", number],
            ["launch", "models/llama-3.2-1b", "--processes", number],
            ["scale", "models/llama-3.2-1b", "--devices", number],
        ):
            refused(capsys, *arguments)
        with pytest.raises(UserError, match="must be I/N"):
            parse_slice(f"{number}/{number}")
    assert time.thread_time() - begin_s < 20


def test_every_number_on_the_command_line_is_finite_and_bounded() -> None:
    tried = 0
    for words, command in commands(ridge):
        for option in command.params:
            if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
                tried += 1
                for text in ("inf", "nan", "1e400", "9" * 20, "-" + "9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 5000, "²"):
                    try:
                        number = option.type.convert(text, option, None)
                    except click.BadParameter:
                        continue
                    whole = isinstance(option.type, click.types.IntParamType)
                    assert abs(number) <= (2**63 - 1 if whole else 1e25), (words, option.name, text)
    assert tried > 80


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + ":00", "1-" + "9" * 5000])
def test_times_and_sizes_of_slurm_with_too_many_digits_are_refused(text: str) -> None:
    for parse in (parse_time_s, parse_memory_bytes):
        with pytest.raises(UserError, match="is not a Slurm") as refusal:
            parse(text, "--time")
        assert len(str(refusal.value)) < 300


def test_a_label_of_any_length_in_a_log_is_read() -> None:
    lines = ["9" * 5000 + ": a\n", "²: b\n", " 3: c\n", "03: d\n", "0: e\n", "00: f\n"]
    assert [list(of_rank(iter(lines), rank)) for rank in (3, 0)] == [["c\n", "d\n"], ["e\n", "f\n"]]


@pytest.mark.parametrize(("variable", "override"), [("bogus", "auto"), ("rocm", "auto"), ("", "rocm")])
def test_a_platform_that_is_not_there_is_named(variable: str, override: str, write: Write, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ridgeline", "train", write(), f"runtime.platform={override}"]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": variable}, capture_output=True, text=True, check=False)
    assert done.returncode == USAGE, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ridge: error: ")]
    assert f"'{variable or override}' (runtime.platform, or JAX_PLATFORMS)" in line and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_row_to_print_has_at_most_a_million_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert "1<=x<=1048576" in refused(capsys, "data", "inspect", str(tmp_path), "--seq-len", "1048577")


def test_other_commands_name_a_platform_that_is_not_there() -> None:
    for words in (["calibrate"], ["bench", "matmul", "quickstart"]):
        done = subprocess.run(
            [sys.executable, "-m", "ridgeline", *words],
            env={**os.environ, "JAX_PLATFORMS": "tpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == USAGE and "cannot start the platform 'tpu'" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("JAX_ENABLE_X64", "maybe"), ("JAX_NUM_CPU_DEVICES", "many"), ("JAX_DEFAULT_MATMUL_PRECISION", "exact")]
)
def test_a_variable_that_jax_does_not_accept_is_named_in_one_line(name: str, value: str) -> None:
    command = [sys.executable, "-m", "ridgeline", "train", "quickstart"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, check=False)
    assert done.returncode == USAGE, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("ridge: error: ") and name in line and value in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["estimate", "model", "quickstart"], ["train", "quickstart"]])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("bogus", "bogus does not begin with --"),
        ("'--xla_dump_to=/tmp'", "does not begin with --"),
        (
            "--xla_gpu_autotune_level=4 --xla_cpu_multi_thread_eigen=maybe",
            "rejects a value among: --xla_gpu_autotune_level=4 --xla_cpu_multi",
        ),
        ("--xla_dump_to='a", "no closing quotation mark behind --xla_dump_to="),
    ],
)
def test_xla_flags_that_would_abort_are_named_in_one_line(flags: str, told: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *command],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == USAGE, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ridge: error: XLA_FLAGS") and told in line


def test_an_unknown_flag_of_xla_does_not_stop_a_training_run(write: Write, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ridgeline", "train", write(), "trainer.steps=1"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": "--xla_never_was=1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "NOT PASSED: " in done.stdout and "--xla_never_was=1" in done.stdout, done.stdout + done.stderr


def test_the_nearest_flag_of_xla_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for flags, told in (("--xla_gpu_autotune_levle=4", "_levle=4; did you mean --xla_gpu_autotune_level?"), ("-", "does not support -")):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert told in refused(capsys, "estimate", "model", "quickstart")
