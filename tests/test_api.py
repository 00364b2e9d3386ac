"""The Python API in one process: load, plan, train, open, evaluate, generate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from ridgeline import api
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.observe.writers import JsonlWriter

TINY = {
    "model.vocab_size": 258,
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": None,
    "model.mlp_dim": 32,
    "model.max_seq_len": 32,
    "precision.compute": "float32",
    "data.seq_len": 32,
    "evaluation.every": 0,
    "evaluation.max_batches": None,
    "trainer.steps": 4,
    "trainer.log_every": 1,
    "schedule.warmup_steps": 0,
    "logging.tensorboard": False,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Overrides of configs/quickstart.yaml: a tiny model on a tiny corpus of bytes."""
    directory = tmp_path_factory.mktemp("api")
    texts = directory / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"{number} is a number, and so is {number + 1}. " * 20)
    prepare(PrepareSettings((texts,), directory / "sets", "bytes", holdouts={"validation": 0.3}), workers=1)
    sets = {"data.train": [{"path": directory / "sets" / "train"}], "evaluation.sets.validation": directory / "sets" / "validation"}
    return TINY | sets | {"run_dir": str(directory / "run")}


@pytest.fixture(scope="module")
def result(settings: dict[str, Any]) -> ridgeline.TrainResult:
    return ridgeline.train(ridgeline.load_config("quickstart", settings))


def test_importing_ridgeline_imports_almost_nothing() -> None:
    code = "import sys, ridgeline; dir(ridgeline); assert not {'jax', 'pydantic', 'ridgeline.api'} & set(sys.modules)"
    plan = "ridgeline.plan(ridgeline.load_config('models/llama-3.2-1b'), cluster='dgx-h100'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{code}; {plan}"], check=True, timeout=120)


def test_the_package_offers_exactly_the_api() -> None:
    assert set(ridgeline.__all__) == {*api.__all__, "PACKAGE"}
    assert all(getattr(ridgeline, name) is getattr(api, name) for name in api.__all__)
    assert not hasattr(ridgeline, "trian")


def test_overrides_are_a_mapping_or_texts() -> None:
    by_mapping = ridgeline.load_config("models/gpt2", {"mesh.fsdp": 2, "run_dir": Path("a: b"), "profiler.start_step": None})
    assert by_mapping == ridgeline.load_config("models/gpt2", ["mesh.fsdp=2", 'run_dir="a: b"', "profiler.start_step=null"])
    with pytest.raises(ridgeline.UserError, match="steps"):
        ridgeline.load_config("models/gpt2", {"trainer.stpes": 2})
    with pytest.raises(ridgeline.UserError, match="list"):
        ridgeline.load_config("models/gpt2", "trainer.steps=2")


def test_a_plan_lists_the_best_layouts() -> None:
    plan = ridgeline.plan(ridgeline.load_config("models/llama-3.2-1b", {"data.batch_size": 64}), cluster="dgx-h100", nodes=[1, 2], top=2)
    assert 1 <= len(plan.best) <= 2
    assert {row.nodes for row in plan.scaling} == {1, 2}
    assert plan.best[0].step.step_s > 0


def test_training_returns_steps_metrics_and_evaluation(result: ridgeline.TrainResult) -> None:
    assert (result.step, result.finished) == (4, True)
    assert result.metrics["train/loss"] > 0
    assert result.evaluation["validation"].loss == pytest.approx(result.metrics["eval/validation/loss"])
    assert result.run.metrics[0]["step"] == 1


def test_a_complete_run_is_not_trained_again(result: ridgeline.TrainResult, settings: dict[str, Any]) -> None:
    again = ridgeline.train(ridgeline.load_config("quickstart", settings))
    assert (again.step, again.finished, again.evaluation) == (4, True, {})
    assert again.metrics == result.metrics


def test_a_run_can_be_opened_and_used(result: ridgeline.TrainResult) -> None:
    run = ridgeline.open_run(str(result.directory))
    assert run.record.starts
    assert run.require_config().trainer.steps == 4
    evaluation = ridgeline.evaluate(result.directory)
    assert evaluation.step == 4
    assert evaluation.sets["validation"].loss == pytest.approx(result.evaluation["validation"].loss, rel=1e-5)
    texts = ridgeline.generate(result.directory, ["1 is", "2"], max_tokens=5, seed=1)
    assert [text.prompt for text in texts] == ["1 is", "2"]
    assert all(1 <= text.tokens <= 5 for text in texts)
    with pytest.raises(ridgeline.UserError, match="not a run directory"):
        ridgeline.open_run(result.directory.parent)
    with pytest.raises(ridgeline.UserError, match="list of strings"):
        ridgeline.generate(result.directory, "1 is")


def test_a_stop_is_an_exception_and_the_same_call_resumes(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ridgeline.load_config("quickstart", settings | {"run_dir": str(tmp_path / "run"), "trainer.steps": 30})
    write = JsonlWriter.write

    def write_and_signal(self: JsonlWriter, step: int, metrics: Any) -> None:
        write(self, step, metrics)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", write_and_signal)
        with pytest.raises(ridgeline.TrainingStopped) as stopped:
            ridgeline.train(config)
    assert signal.getsignal(signal.SIGINT) is handler
    assert stopped.value.signal_name == "SIGINT"
    assert stopped.value.step is not None
    assert 3 <= stopped.value.step < 30
    assert ridgeline.train(config).step == 30
    assert len(ridgeline.open_run(tmp_path / "run").record.starts) == 2


def test_devices_that_jax_no_longer_makes_are_refused(result: ridgeline.TrainResult, settings: dict[str, Any]) -> None:
    with pytest.raises(ridgeline.UserError, match=r"runtime\.cpu_devices=3"):
        ridgeline.train(ridgeline.load_config("quickstart", settings | {"runtime.cpu_devices": 3, "runtime.platform": "cpu"}))
