"""Compilations during training: heard of, told from first ones, and the argument that changed named."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ridgeline.observe.compilation import EAGER, CompilerWatch, compare
from ridgeline.rundir.events import EventLog, event_file, read_events
from ridgeline.rundir.phases import phases
from ridgeline.rundir.recompilation import Change, recompilations


@pytest.fixture
def logged():
    return []


@pytest.fixture
def watch(tmp_path, logged):
    watch = CompilerWatch(EventLog(event_file(tmp_path, 0), run="r"), logged.append)
    watch.start()
    watch.step = 7
    yield watch
    watch.close()


def found(tmp_path):
    return recompilations(read_events(event_file(tmp_path, 0)), 0)


def compiles(tmp_path):
    return [p.fields["program"] for p in phases(read_events(event_file(tmp_path, 0))) if p.name == "compile"]


def test_a_jitted_function_of_the_users_is_found_with_the_argument_that_changed(watch, tmp_path, logged, caplog):
    @jax.jit
    def smooth(history, *, options):
        return (history * options["weight"]).sum()

    arrays = {n: jnp.ones(n) for n in (4, 5)}
    with caplog.at_level(logging.WARNING):
        for n in (4, 4, 5, 4):
            smooth(arrays[n], options={"weight": 1.0})
    (again,) = found(tmp_path)
    assert (again.program, again.step, again.arguments) == ("smooth", 7, (Change("history", "f32[4]", "f32[5]"),))
    assert again.source.split(":")[0] == __file__
    assert again.duration_s > 0
    assert compiles(tmp_path).count("smooth") == 2  # the first is no recompilation, but time all the same
    assert logged == [again.describe()]
    assert "history f32[4] -> f32[5]" in logged[0]
    assert "CACHE MISS" not in caplog.text


def test_a_dtype_deep_in_a_tree_is_named_by_its_path(watch, tmp_path):
    @jax.jit
    def total(batch):
        return batch["tokens"][0].sum()

    integers, floats = jnp.ones(4, jnp.int32), jnp.ones(4)
    total({"tokens": [integers]})
    total({"tokens": [floats]})
    assert found(tmp_path)[0].arguments == (Change("batch['tokens'][0]", "i32[4]", "f32[4]"),)


@pytest.fixture
def split():
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    return NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def step(state, batch):
    return state + batch["tokens"].sum(), batch["tokens"].mean()


def test_a_program_compiled_ahead_of_time_follows_a_drifting_batch_and_names_it(watch, tmp_path, split):
    by_data, whole = split

    def batch(rows, sharding):
        return {"tokens": jax.device_put(jnp.ones(rows), sharding)}

    abstract = {"tokens": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=by_data)}
    program = watch.program(jax.jit(step, donate_argnums=0), "train_step", jax.ShapeDtypeStruct((), jnp.float32, sharding=whole), abstract)
    state, means = jax.device_put(jnp.float32(0), whole), []
    for rows, sharding in ((8, by_data), (16, by_data), (8, by_data), (16, by_data), (16, whole)):
        state, mean = program(state, batch(rows, sharding))
        means.append(float(mean))
    assert float(state) == 64.0  # nothing was lost or donated twice
    assert means == [1.0] * 5
    assert [r.arguments for r in found(tmp_path)] == [
        (Change("batch['tokens']", "float32[8] ('data',)", "float32[16] ('data',)"),),
        (Change("batch['tokens']", "float32[16] ('data',)", "float32[16] ()"),),
    ]
    assert compiles(tmp_path).count("train_step") == 3  # the one ahead of time too
    assert "HloModule jit_step" in program.as_text()


def test_what_a_program_refuses_for_another_reason_is_an_error_still(watch, split):
    program = watch.program(jax.jit(step), "train_step")
    program(jnp.float32(0), {"tokens": jnp.ones(4)})
    with pytest.raises(TypeError):
        program(jnp.float32(0))


def test_operations_of_jax_itself_count_once_they_keep_coming(watch, tmp_path):
    arrays = [jnp.ones(n) for n in range(100, 102 + EAGER)]  # each compiles its fill anew
    assert len(arrays) > EAGER
    assert {r.program for r in found(tmp_path)} == {"broadcast_in_dim"}
    assert len(found(tmp_path)) == len(arrays) - EAGER + 1


def test_what_a_save_slices_is_no_recompilation(watch, tmp_path):
    with watch.events.phase("train"), watch.events.phase("save"):
        for n in range(200, 202 + EAGER):
            jnp.ones(n)
    thread = threading.Thread(target=lambda: [jnp.ones(n) for n in range(300, 302 + EAGER)])
    thread.start()
    thread.join()
    assert found(tmp_path) == []


def test_nothing_is_heard_after_the_end_and_jax_is_as_it_was(watch, tmp_path):
    watch.close()
    watch.close()

    @jax.jit
    def late(x):
        return x + 1

    late(jnp.ones(3))
    late(jnp.ones(2))
    assert found(tmp_path) == []
    assert not jax.config.jax_explain_cache_misses
    assert not any(type(f).__name__ == "_Explanations" for f in logging.getLogger("jax._src.interpreters.partial_eval").filters)


def test_arguments_on_one_side_only_are_absent_on_the_other():
    assert compare([("a", "f32[1]")], [("b", "f32[1]")]) == [Change("a", "f32[1]", "absent"), Change("b", "absent", "f32[1]")]
