"""Metric files, read back with the readers users have: JSON lines and TensorBoard's event accumulator."""

import json
import logging
import math
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import event_file_writer

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import LoggingConfig
from ridgeline.observe.writers import JsonlWriter, MultiWriter, TensorBoardWriter, build_writers, config_table
from ridgeline.rundir.directory import read_metrics

CONFIG = {"name": "x", "trainer": {"steps": 100, "names": ["a|b"]}, "empty": {}}


def writers(run_dir, **kwargs):
    return build_writers(LoggingConfig(), run_dir, name="x", run="abc", config=CONFIG, **kwargs)


def tensorboard(run_dir):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_metrics_come_back_from_both_files(tmp_path):
    writer = writers(tmp_path)
    writer.write(10, {"train/loss": 2.5, "train_speed/mfu": 0.4})
    writer.write(20, {"train/loss": 2.25, "eval/val/loss": 2.0})
    writer.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["train/loss"]) for r in records] == [(10, 2.5), (20, 2.25)]
    board = tensorboard(tmp_path)
    assert sorted(board.Tags()["scalars"]) == ["eval/val/loss", "train/loss", "train_speed/mfu"]
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(10, 2.5), (20, 2.25)]
    assert board.Scalars("train/loss")[0].wall_time == pytest.approx(records[0]["time"], abs=60)


def test_the_config_is_a_text_table(tmp_path):
    writers(tmp_path).close()
    board = tensorboard(tmp_path)
    (event,) = board.Tensors("config/text_summary")
    assert board.summary_metadata["config/text_summary"].plugin_data.plugin_name == "text"
    assert event.tensor_proto.string_val[0].decode() == config_table(CONFIG)
    assert "| `trainer.steps` | `100` |" in config_table(CONFIG)
    assert "a\\|b" in config_table(CONFIG)


def test_a_resumed_run_shows_every_step_once(tmp_path):
    first = writers(tmp_path)
    for step in range(10, 130, 10):
        first.write(step, {"train/loss": 1000.0 + step})
    first.close()
    second = writers(tmp_path, restart=1, resume_step=100)
    for step in range(110, 150, 10):
        second.write(step, {"train/loss": 2000.0 + step})
    second.close()
    expected = [(s, 1000.0 + s) for s in range(10, 101, 10)] + [(s, 2000.0 + s) for s in range(110, 150, 10)]
    assert [(e.step, e.value) for e in tensorboard(tmp_path).Scalars("train/loss")] == expected
    assert [(r["step"], r["train/loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert [e.step for e in tensorboard(tmp_path).Tensors("config/text_summary")] == [0, 100]


def test_a_run_that_died_before_its_first_checkpoint_starts_its_curves_anew(tmp_path):
    for restart in range(2):
        writer = writers(tmp_path, restart=restart)
        writer.write(10, {"train/loss": float(restart)})
        writer.close()
    assert [e.value for e in tensorboard(tmp_path).Scalars("train/loss")] == [1.0]
    assert [r["train/loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]


def test_a_torn_last_line_is_cut_and_the_file_continues(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    path.write_bytes(path.read_bytes() + b'{"step":2,"train/lo')
    again = JsonlWriter(path, resume_step=1)
    again.write(2, {"train/loss": 3.0})
    again.close()
    assert [r["train/loss"] for r in read_metrics(path)] == [1.0, 3.0]


def test_non_finite_values_are_strict_json_and_come_back(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf})
    writer.close()
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["train/loss"])
    assert record["train/grad_norm"] == math.inf


def test_an_undocumented_metric_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="train/lsos"):
        writers(tmp_path).write(1, {"train/lsos": 1.0})


def test_only_process_0_writes(tmp_path):
    writer = writers(tmp_path, process=1)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_an_event_file_is_not_written_through_a_link_of_its_name(tmp_path, monkeypatch, kind):
    """The name is made of the second, the machine, the restart and the number of the file: all of them are taken."""
    monkeypatch.setattr(event_file_writer.time, "time", lambda: 1_700_000_000.5)
    victim = tmp_path / "victim"
    if kind == "file":
        victim.write_text("mine")
    (tmp_path / "tensorboard").mkdir()
    for number in range(2):
        (tmp_path / f"tensorboard/events.out.tfevents.1700000000.{socket.gethostname()}.0003.{number:03d}").symlink_to(victim)
    writer = TensorBoardWriter(tmp_path / "tensorboard", restart=3)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert (victim.read_text() == "mine") if kind == "file" else not victim.exists()
    [own] = [path for path in (tmp_path / "tensorboard").iterdir() if not path.is_symlink()]
    assert own.stat().st_size > 0


def test_tensorboard_can_be_off(tmp_path):
    writer = build_writers(LoggingConfig(tensorboard=False), tmp_path, name="x", run="", config=CONFIG)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_flushed_metrics_are_on_disk_before_close(tmp_path):
    clock = iter(float(t) for t in range(0, 1000, 4)).__next__
    writer = TensorBoardWriter(tmp_path / "tensorboard", flush_s=100.0, clock=clock)
    writer.write(1, {"train/loss": 1.0})
    assert tensorboard(tmp_path).Tags()["scalars"] == []
    writer.flush()
    assert len(tensorboard(tmp_path).Scalars("train/loss")) == 1
    for step in range(2, 40):
        writer.write(step, {"train/loss": 1.0})
    assert len(tensorboard(tmp_path).Scalars("train/loss")) > 10


def test_unwritable_places_are_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        JsonlWriter(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(UserError, match="cannot write TensorBoard files"):
        TensorBoardWriter(tmp_path / "file" / "tensorboard")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_loses_metrics_with_one_warning_and_later_ones_are_written(tmp_path, caplog):
    writer = writers(tmp_path)
    writer.write(1, {"train/loss": 1.0})
    writer.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with caplog.at_level(logging.WARNING):
            for step in range(2, 6):
                writer.write(step, {"train/loss": float(step)})
                writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for step in range(6, 9):
        writer.write(step, {"train/loss": float(step)})
        writer.flush()
    writer.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 6, 7, 8]
    assert {1, 7, 8} <= {e.step for e in tensorboard(tmp_path).Scalars("train/loss")}
    warnings = [r.message for r in caplog.records]
    assert len([w for w in warnings if "lines are dropped" in w]) == 1
    assert len([w for w in warnings if "metrics are not written" in w]) == 1


def test_wandb_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'ridgeline\[wandb\]'"):
        build_writers(LoggingConfig(wandb_project="p"), tmp_path, name="x", run="", config=CONFIG)


def test_every_writer_gets_everything(tmp_path):
    both = [JsonlWriter(tmp_path / f"{name}.jsonl") for name in "ab"]
    MultiWriter(both).write(3, {"train/loss": 1.0})
    assert [read_metrics(tmp_path / f"{name}.jsonl")[0]["step"] for name in "ab"] == [3, 3]


def test_tensorboard_files_are_written_without_loading_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('loaded')")
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from observe.writers import TensorBoardWriter
writer = TensorBoardWriter(Path(sys.argv[1]))
writer.write(1, {"train/loss": 2.0})
writer.close()
assert "tensorboardX" in sys.modules and "torch" not in sys.modules
import torch
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=root, check=False)
    assert done.stderr.strip().endswith("loaded"), "by us, and only at the end"
    assert list(tmp_path.glob("events*"))
