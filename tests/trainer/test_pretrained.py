"""Starting from the parameters of a run, of an import, and of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline import models
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import CheckpointConfig, ComputeConfig, Config, PrecisionConfig
from ridgeline.loaders.tokenizers import ByteTokenizer
from ridgeline.models.huggingface.convert import export_weights, hf_config
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.pretrained import changed_positions, load_params, open_source, start_from
from ridgeline.trainer.state import TrainState, model_spec

MODEL = ModelConfig(vocab_size=258, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, max_seq_len=64)


def new_run(**sections):
    """The spec of a run, and a state whose parameters are still to come (nothing here needs a compiled initialization)."""
    config = Config.model_validate({"model": MODEL, "mesh": {"fsdp": 8}, **sections})
    spec = model_spec(config, Partitioner(build_mesh(config.mesh), Rules.from_config(config.mesh)))
    zero = jnp.zeros((), jnp.int32)
    return spec, TrainState(
        step=zero, params=None, opt_state=(), amax={}, skipped=zero, bad_in_a_row=zero, rng=jax.random.key_data(jax.random.key(0))
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint, and its parameters."""
    path = tmp_path_factory.mktemp("pretrained") / "run"
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(Config.model_validate({"model": MODEL, "mesh": {"fsdp": 8}})))
    spec, state = new_run()
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, dtype=np.float32), spec.abstract_params)
    checkpointer = Checkpointer(path / "checkpoints", CheckpointConfig())
    checkpointer.save(5, replace(state, params=jax.device_put(params, spec.param_shardings)), {"kind": "train"}, block=True)
    checkpointer.close()
    ByteTokenizer().save_copy(path / "tokenizer")
    return path, params


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), one, other)))


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2, "data": 2}, {"fsdp": 8}], ids=str)
def test_a_run_starts_from_another_runs_parameters_on_its_own_mesh(run, mesh):
    path, params = run
    spec, state = new_run(mesh=mesh)
    started = start_from(path, MODEL, ByteTokenizer().sha256, spec, state)
    assert equal(started.params, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, started.params) == spec.param_shardings
    assert int(started.step) == 0


def test_parameters_are_read_into_the_dtype_of_the_run(run):
    path, params = run
    spec, _ = new_run(precision={"params": "bfloat16"})
    loaded, step = load_params(open_source(path), spec)
    assert step == 5
    assert equal(loaded, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))


def test_a_run_starts_from_a_hugging_face_directory(tmp_path):
    decoder = models.build(MODEL, ComputeConfig(), PrecisionConfig(), Partitioner.single(), nnx.Rngs(params=3))
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    values = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    export_weights(MODEL, lambda path, layer: values[path] if layer is None else values[path][layer], tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(MODEL, "float32", {})))
    ByteTokenizer().save_copy(tmp_path)
    spec, state = new_run(mesh={"fsdp": 4, "tensor": 2})
    assert equal(start_from(tmp_path, MODEL, ByteTokenizer().sha256, spec, state).params, params)


def test_other_rope_settings_are_named_and_suspected_where_rows_are_no_longer(run):
    path, _ = run
    other = MODEL.model_copy(update={"rope_theta": 5e5})
    named, warning = changed_positions(path, MODEL, other)
    assert named == f"{path} has model.rope_theta = 10000.0, this run 500000.0"
    assert warning.startswith("WARNING: RoPE settings changed and model.max_seq_len is not larger")
    assert len(changed_positions(path, MODEL, other.model_copy(update={"max_seq_len": 128}))) == 2
    assert changed_positions(path, MODEL, MODEL) == []


def test_another_model_another_tokenizer_and_no_model_are_refused(run, tmp_path):
    path, _ = run
    spec, state = new_run()
    other = MODEL.model_copy(update={"embed_dim": 64, "rotary_fraction": 0.5})
    with pytest.raises(UserError, match=r"model.embed_dim = 64 \(.* 32\), model.rotary_fraction"):
        start_from(path, other, ByteTokenizer().sha256, spec, state)
    with pytest.raises(UserError, match="tokenizer"):
        start_from(path, MODEL, "f" * 64, spec, state)
    with pytest.raises(UserError, match=r"neither config\.yaml .* nor config\.json"):
        start_from(tmp_path, MODEL, ByteTokenizer().sha256, spec, state)
    shutil.copyfile(path / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(UserError, match="no checkpoint"):
        start_from(tmp_path, MODEL, ByteTokenizer().sha256, spec, state)


@pytest.mark.parametrize(("stored", "wanted"), [(None, 264), (264, None), (264, 272), (272, 264)])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_padding_grows_and_shrinks(tmp_path, stored, wanted, tied):
    model = MODEL.model_copy(update={"pad_vocab_to": stored, "tie_embeddings": tied})
    mesh = {"tensor": 2, "fsdp": 4}
    spec, state = new_run(model=model, mesh=mesh)
    params = jax.tree.map(lambda leaf: np.random.default_rng(7).standard_normal(leaf.shape, dtype=np.float32), spec.abstract_params)
    (tmp_path / "config.yaml").write_text(to_yaml(Config.model_validate({"model": model, "mesh": mesh})))
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    checkpointer.save(5, replace(state, params=jax.device_put(params, spec.param_shardings)), {"kind": "train"}, block=True)
    checkpointer.close()

    other = model.model_copy(update={"pad_vocab_to": wanted})
    spec, state = new_run(model=other, mesh=mesh, precision={"params": "bfloat16"})
    started = start_from(tmp_path, other, ByteTokenizer().sha256, spec, state).params
    assert jax.tree.map(lambda leaf: leaf.sharding, started) == spec.param_shardings
    rows = MODEL.vocab_size
    for name, dim in [("embedding", 0)] + ([] if tied else [("output", 1)]):
        table, before = np.asarray(started.pop(name)).swapaxes(0, dim), params.pop(name).swapaxes(0, dim)
        assert len(table) == other.padded_vocab_size
        np.testing.assert_array_equal(table[:rows], before[:rows].astype("bfloat16"))
        assert not table[rows:].astype(np.float32).any()
    assert equal(started, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))
    with pytest.raises(UserError, match="vocab_size"):
        start_from(tmp_path, other.model_copy(update={"vocab_size": 257}), ByteTokenizer().sha256, spec, state)
