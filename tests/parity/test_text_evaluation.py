"""Tasks and samples during training: what they record, and that training is the same without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.directory import read_metrics
from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.goodput import run_ledger
from ridgeline.rundir.phases import phases
from ridgeline.rundir.recompilation import recompilations
from ridgeline.trainer.run import train
from tests.trainer.test_run import ROOT, environment

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compile")]
STEPS, LENGTH = 4, 64
PROMPTS = ["import ", "a | b\n"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "text.txt").write_text(Path(__file__).read_text() * 4)
    prepare(PrepareSettings((directory / "text.txt",), directory / "set", "bytes"), workers=1)
    rows = [{"question": f"{n} is", "answer": ["odd", "even"][n % 2 == 0], "text": f"number {n}"} for n in range(6)]
    (directory / "tasks").mkdir()
    (directory / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "tasks" / "parity.yaml").write_text(f"""
task: parity_of_numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {directory / "tasks" / "rows.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: [odd, even]
metric_list:
  - metric: acc
""")
    return directory


def make_config(corpus: Path, run_dir: Path, **evaluation: Any) -> Config:
    model = {"vocab_size": 258, "num_layers": 2, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64, "max_seq_len": LENGTH}
    return Config.model_validate(
        {
            "name": "texts",
            "run_dir": str(run_dir),
            "model": model,
            "mesh": {"fsdp": 4, "tensor": 2},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpus / "set")}], "seq_len": LENGTH, "batch_size": 8},
            "trainer": {"steps": STEPS, "log_every": 1},
            "checkpoint": {"every": 2},
            "evaluation": evaluation,
        }
    )


def losses(config: Config) -> dict[int, float]:
    return {r["step"]: r["train/loss"] for r in read_metrics(config.directory / "metrics.jsonl") if "train/loss" in r}


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    tasks = {"names": ["parity_of_numbers"], "directory": str(corpus / "tasks"), "every": 2, "batch_size": 8}
    samples = {"prompts": PROMPTS, "every": 2, "max_tokens": 8, "temperature": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        config = make_config(corpus, tmp_path_factory.mktemp("run"), tasks=tasks, samples=samples)
        train(config, command=["test"])
    return config


def test_training_is_bitwise_the_same_without_them(corpus: Path, trained: Config, tmp_path: Path) -> None:
    plain = make_config(corpus, tmp_path / "plain")
    train(plain, command=["test"])
    assert losses(plain) == losses(trained)
    assert len(losses(plain)) == STEPS


def test_two_processes_have_the_scores_and_samples_of_one(trained: Config, tmp_path: Path) -> None:
    """The same mesh over the devices of two processes."""
    file, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(to_yaml(trained))
    words = [sys.executable, "-m", "ridgeline", "launch", "--processes", "2", str(file), f"run_dir={run_dir}", "runtime.cpu_devices=4"]
    offline = {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, env=environment() | offline, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500
    )
    assert done.returncode == 0, done.stdout
    config = trained.model_copy(update={"run_dir": run_dir})
    assert losses(config) == pytest.approx(losses(trained), rel=1e-5)

    def scores(of: Config) -> list[dict[str, float]]:
        records = read_metrics(of.directory / "metrics.jsonl")
        return [{key: value for key, value in r.items() if key.startswith("task/")} for r in records if "task/parity_of_numbers/acc" in r]

    def texts(of: Config, process: int = 0) -> list[Any]:
        return [event.fields["samples"] for event in read_events(event_file(of.directory, process)) if "samples" in event.fields]

    assert len(scores(trained)) == len(texts(trained)) == 2
    assert scores(config) == [pytest.approx(row) for row in scores(trained)]
    assert texts(config) == texts(config, process=1) == texts(trained)


def test_results_are_metrics_events_and_texts_in_tensorboard(trained: Config) -> None:
    records = [r for r in read_metrics(trained.directory / "metrics.jsonl") if "samples/tokens" in r]
    assert [record["step"] for record in records] == [2, 4]
    tasks = [r for r in read_metrics(trained.directory / "metrics.jsonl") if "task/parity_of_numbers/acc" in r]
    assert [record["step"] for record in tasks] == [2, 4]
    assert all(0 <= record["task/parity_of_numbers/acc"] <= 1 and "task/parity_of_numbers/acc_stderr" in record for record in tasks)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(trained.directory / "tensorboard"))
    board.Reload()
    texts = board.Tensors("samples/text_summary")
    assert [text.step for text in texts] == [2, 4]
    assert "a \\| b<br>" in texts[0].tensor_proto.string_val[0].decode()


def test_their_time_is_evaluation_and_no_recompilation(trained: Config) -> None:
    events = read_events(event_file(trained.directory, 0))
    evaluations = [phase for phase in phases(events) if phase.name == "evaluation"]
    assert len(evaluations) == 4
    assert run_ledger(events).seconds["evaluation"] == pytest.approx(sum(phase.duration_s for phase in evaluations), rel=0.05)
    assert list(recompilations(events, 0)) == []


def test_the_last_samples_and_scores_are_those_of_the_finished_run(trained: Config) -> None:
    events = read_events(event_file(trained.directory, 0))
    *_, recorded = [event.fields["samples"] for event in events if "samples" in event.fields]
    rows = ridgeline.generate(trained.directory, PROMPTS, temperature=0, max_tokens=8)
    assert [sample["text"] for sample in recorded] == [row.text for row in rows]
    tasks = trained.evaluation.tasks
    (accuracy,) = ridgeline.evaluate_tasks(trained.directory, tasks.names, tasks_dir=tasks.directory).metrics
    last = [r for r in read_metrics(trained.directory / "metrics.jsonl") if "task/parity_of_numbers/acc" in r][-1]
    assert accuracy.value == last["task/parity_of_numbers/acc"]


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"samples": {"prompts": ["x" * 60], "max_tokens": 8}}, "prompt 1 (61 tokens) plus 8 new tokens is too long"),
        ({"samples": {"file": "absent.txt"}}, "prompts cannot be read"),
        ({"samples": {"prompts": ["x"], "chat": True}}, "chat template"),
        ({"tasks": {"names": ["x"], "directory": "absent"}}, "contains no task files"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_run_directory_exists(
    corpus: Path, tmp_path: Path, evaluation: dict[str, Any], expected: str
) -> None:
    config = make_config(corpus, tmp_path / "run", **evaluation)
    with pytest.raises(UserError) as raised:
        train(config, command=["test"])
    assert expected in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["evaluation.tasks.every=5"], "there is no task"),
        (["evaluation.samples.every=5"], "there is no prompt"),
        (["evaluation.samples.prompts=[x]", "mesh.pipeline=2"], "evaluation.samples.prompts do not go with mesh.pipeline=2"),
        (["evaluation.samples.prompts=[x]", "evaluation.samples.top_p=1.5"], "at most 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load("quickstart", overrides)
