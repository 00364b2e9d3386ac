"""What a checkpoint is bound to: config, corpora, tokenizer files. (Step and run: test_checkpoint_damage.py.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.rundir.directory import RunDir
from ridgeline.trainer.checkpoint import identity
from ridgeline.trainer.start import check_restored, keep_tokenizer

SMALL = {"vocab_size": 300, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48, "max_seq_len": 64, "position": "rope"}


def saved_with(config: Config, tokenizer: Path = Path("none"), **corpora: str) -> dict[str, Any]:
    """Metadata of step 7, as it is read back from a checkpoint."""
    return json.loads(json.dumps({"step": 7, **identity.describe(config, "r1", "0" * 64, tokenizer, corpora)}))


def config(**model: Any) -> Config:
    return Config.model_validate({"name": "r", "model": {**SMALL, **model}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 10001.0), ("norm_eps", 2e-5), ("num_layers", 3), ("embed_dim", 64), ("num_kv_heads", 2), ("mlp_dim", 64)],
)
def test_a_model_that_was_changed_in_config_yaml_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    before, after = config(), config(**{key: value})
    if before == after:
        pytest.fail(f"{key} has this value already")
    for check in (
        lambda: identity.check_config(after, saved_with(before), tmp_path),
        lambda: check_restored(saved_with(before), after, {}, lambda line: None),
    ):
        with pytest.raises(UserError, match=rf"model\.{key}: ") as error:
            check()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"^{tmp_path}/config.yaml differs .* step 7 was saved with .*: change it back$"):
        identity.check_config(after, saved_with(before), tmp_path)


def test_a_config_as_saved_or_changed_as_a_resume_may_is_accepted(tmp_path: Path) -> None:
    assert identity.check_config(config(), saved_with(config()), tmp_path) is None
    later = config().model_copy(update={"name": "other", "run_dir": tmp_path})
    assert identity.check_config(later, saved_with(config()), tmp_path) is None
    note = identity.check_config(config(max_seq_len=128), saved_with(config()), tmp_path)
    assert note is not None and "model.max_seq_len: 64 -> 128" in note and "\n" not in note


def test_a_checkpoint_of_an_earlier_version_is_read_with_a_note(tmp_path: Path) -> None:
    old = {"step": 7, "config_sha256": "0" * 64, "tokenizer": "0" * 64}
    note = identity.check_config(config(), old, tmp_path)
    assert note is not None and "step 7 does not contain its config" in note
    said: list[str] = []
    check_restored(old, config(), {"/data": "1"}, said.append)
    assert len(said) == 1 and "earlier version" in said[0]
    assert identity.misplaced(old, 7, "r1") is None
    assert identity.damaged_tokenizer(old, tmp_path) == []


def test_a_corpus_replaced_under_its_path_is_noticed_at_a_resume() -> None:
    said: list[str] = []
    metadata = saved_with(config(), **{"/data/a": "1", "/data/b": "2"})
    check_restored(metadata, config(), {"/data/a": "1", "/data/b": "3", "/data/new": "4"}, said.append)
    (line,) = said
    assert line.startswith("WARNING: /data/b is not the corpus that step 7 was trained on")


def write(place: Path, **files: str) -> Path:
    place.mkdir(exist_ok=True)
    for name, text in files.items():
        (place / f"{name}.json").write_text(text)
    return place


def test_damage_of_any_tokenizer_file_is_noticed(tmp_path: Path) -> None:
    place = write(tmp_path / "tokenizer", tokenizer="{}", tokenizer_config="[]", special="{}")
    metadata = saved_with(config(), place)
    identity.check_tokenizer_files(metadata, place)
    (place / "README.md").write_text("not ours")
    identity.check_tokenizer_files(metadata, place)
    for file in sorted(place.glob("*.json")):
        content = file.read_bytes()
        for damage in (lambda: file.write_bytes(content[:-1]), file.unlink, file.mkdir):  # noqa: B023
            damage()
            with pytest.raises(UserError, match=f"{file} is missing or damaged") as error:
                identity.check_tokenizer_files(metadata, place)
            assert "\n" not in str(error.value)
        file.rmdir()
        file.write_bytes(content)


def test_a_start_copies_the_tokenizer_only_where_none_depends_on_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run, said = RunDir(tmp_path / "run"), list[str]()
    source, own = write(tmp_path / "source", tokenizer="1", extra="1"), run.tokenizer

    def start(metadata: dict[str, Any] | None) -> dict[str, str]:
        keep_tokenizer(source, run, metadata, said.append)
        assert sorted(path.name for path in run.path.iterdir()) == ["tokenizer"]
        return {path.stem: path.read_text() for path in own.iterdir()}

    assert start(None) == {"tokenizer": "1", "extra": "1"}
    metadata = saved_with(config(), own)
    write(source, extra="2")
    assert start(metadata) == {"tokenizer": "1", "extra": "1"}, "the checkpoint was saved with these"
    assert not said
    write(own, extra="damaged")
    assert start(metadata) == {"tokenizer": "1", "extra": "damaged"}
    assert len(said) == 1 and f"{own}/extra.json is missing or damaged" in said[0]
    write(source, extra="1")
    assert start(metadata) == {"tokenizer": "1", "extra": "1"}
    write(source, extra="2")
    (run.path / ".tokenizer.new").mkdir()  # a start was killed here
    assert start(None) == {"tokenizer": "1", "extra": "2"}, "no checkpoint depends on the old one"
