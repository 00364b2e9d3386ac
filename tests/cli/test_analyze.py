"""`ridge analyze` on a real capture of eight CPU devices, on hand-written ones, and on what is no profile."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ridgeline.cli.main import run as ridge
from ridgeline.configs.schema import ProfilerConfig
from ridgeline.observe.profiler import Profiler, step_annotation
from tests.explain.xspace import gpu, kernel, write

CONTRACT = {
    "device": str,
    "total_s": float,
    "compute_s": float,
    "communication_s": float,
    "exposed_communication_s": float,
    "exposed_copy_s": float,
    "idle_s": float,
    "idle_by_cause": dict,
    "residual_s": float,
}


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """Steps 1 to 3 of a product, divided over eight devices, whose result is summed over all."""
    directory = tmp_path_factory.mktemp("run")
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def train_step(x, w):
        with jax.named_scope("mlp"):
            y = jax.lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v @ w), x)
        with jax.named_scope("loss"):
            return jax.lax.psum(y.T @ y, "fsdp")

    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P(), check_vma=False)
    x, w = jnp.ones((1024, 128)), jnp.ones((128, 128))
    compiled = jax.jit(mapped).lower(x, w).compile()
    x = jax.device_put(x, compiled.input_shardings[0][0])
    w = jax.device_put(w, compiled.input_shardings[0][1])
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=3), directory, hlo_text=compiled.as_text, step_time_s=lambda: 0.001)
    for number in range(5):
        profiler.before_step(number, drain=lambda: None)
        with step_annotation(number):
            jax.block_until_ready(compiled(x, w))
    profiler.close(5)
    return directory


def analyzed(capsys, *arguments):
    assert ridge(["analyze", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_real_capture_is_accounted_for_step_by_step(logdir, capsys):
    report = analyzed(capsys, logdir, "--warm-up", "0")
    assert set(report) >= {"devices", "steps", "components", "collectives", "hosts"}
    assert len(report["devices"]) == 8
    for device in report["devices"]:
        assert {key: type(device[key]) for key in CONTRACT} == CONTRACT
        parts = sum(device[key] for key in ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s", "residual_s"))
        assert parts == pytest.approx(device["total_s"], rel=1e-9)
        assert sum(device["idle_by_cause"].values()) == pytest.approx(device["idle_s"])
        assert device["compute_s"] > 0
        assert 0 < device["exposed_communication_s"] <= device["communication_s"] < device["total_s"]
    assert [s["step"] for s in report["steps"]] == [1, 2, 3]
    assert report["step_assignment"][0]["method"] == "run id"
    assert report["unprofiled_step_time_s"] == 0.001


def test_its_work_is_divided_by_component_and_its_collectives_are_measured(logdir, capsys):
    report = analyzed(capsys, logdir)
    flops = {c["component"]: c["flops"] for c in report["components"]}
    assert flops["mlp"] == pytest.approx(3 * 2 * 128 * 128 * 128)  # 1024 / 8 rows on each device, three times
    assert flops["loss"] == pytest.approx(2 * 128 * 128 * 128)
    assert {c["ceiling_s"] for c in report["components"]} == {None}  # no datasheet of this CPU
    (traffic,) = report["collectives"]
    assert (traffic["kind"], traffic["axes"], traffic["layer"], traffic["bytes"]) == ("all-reduce", ["devices"], "loss", 128 * 128 * 4)
    assert 0 <= traffic["wait_s"] <= traffic["time_s"]
    assert traffic["wire_s"] == pytest.approx(traffic["time_s"] - traffic["wait_s"])
    assert any(o["source"] and o["source"].startswith(__file__) for o in report["operations"])
    assert analyzed(capsys, logdir, "--device", "h100-sxm")["components"][0]["attained"] > 0


def test_the_tables_name_the_parts_and_the_unprofiled_step_time(logdir, capsys):
    assert ridge(["analyze", str(logdir)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "without the profiler: 1 ms",
        "steps assigned by run id",
        "communication, exposed",
        "residual",
        "mlp",
        "all-reduce",
    ):
        assert text in shown
    assert "no datasheet for cpu" in shown


def test_a_capture_may_be_named_and_a_wrong_name_is_corrected(logdir, capsys):
    (capture,) = (logdir / "tensorboard" / "plugins" / "profile").iterdir()
    assert analyzed(capsys, logdir, "--capture", capture.name)["profile"] == str(capture)
    assert analyzed(capsys, capture)["devices"] == analyzed(capsys, next(capture.glob("*.xplane.pb")))["devices"]
    assert ridge(["analyze", str(logdir), "--capture", capture.name[:-1]]) == 2
    assert f"did you mean '{capture.name}'?" in capsys.readouterr().err


def test_several_hosts_are_analysed_together(tmp_path, capsys):
    for name in ("node01-p00000", "node02-p00001"):
        write(tmp_path / f"{name}.xplane.pb", [gpu(0, {"Stream #1(Kernel)": [kernel("gemm", 0, 7), kernel("nccl", 7, 10)]})])
    report = analyzed(capsys, tmp_path)
    assert [d["device"] for d in report["devices"]] == ["node01-p00000/gpu:0", "node02-p00001/gpu:0"]
    assert [h["process"] for h in report["hosts"]] == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("none.xplane.pb", None, "does not exist"),
        ("x.txt", b"hello", ".xplane.pb"),
        ("empty.xplane.pb", b"", "is empty: the profile was not written"),
        ("foreign.xplane.pb", b"hello, world", "is not a complete xplane profile"),
        ("no_work.xplane.pb", [gpu(0, {})], "contains no device work"),
    ],
)
def test_what_is_no_profile_gives_one_line(tmp_path, capsys, name, content, complaint):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        write(tmp_path / name, content)
    assert ridge(["analyze", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_a_run_without_a_profile_names_the_command_that_makes_one(tmp_path, capsys):
    assert ridge(["analyze", str(tmp_path)]) == 2
    assert "profiler.start_step" in capsys.readouterr().err


def test_damaged_neighbors_of_a_profile_are_named(tmp_path, capsys):
    file = write(tmp_path / "a.xplane.pb", [gpu(0, {"Stream #1(Kernel)": [kernel("gemm", 0, 7)]})])
    (tmp_path / "jit_f.hlo.txt").write_text("not HLO")
    assert ridge(["analyze", str(file)]) == 2
    assert "jit_f.hlo.txt cannot be read" in capsys.readouterr().err
    (tmp_path / "jit_f.hlo.txt").unlink()
    (tmp_path / "capture.json").write_text("{")
    assert ridge(["analyze", str(file)]) == 2
    assert "capture.json" in capsys.readouterr().err
