"""What a start reports before it compiles: a held-out set that was trained on, bfloat16 parameters, wandb without a login."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, LoggingConfig
from ridgeline.loaders.overlap import overlap, sample
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.observe.writers import check_writers
from ridgeline.trainer.checkpoint.directories import step_dir
from ridgeline.trainer.checkpoint.integrity import MANIFEST
from ridgeline.trainer.prepare import start_warnings
from tests.loaders.token_corpora import random_docs, write_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sets/{train,held}: one split; all, copy: the same input without a split; other: another input."""
    root = tmp_path_factory.mktemp("corpora")
    for name in ("text", "other"):
        (root / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(40)))
    text, other = (root / "text.jsonl",), (root / "other.jsonl",)
    prepare(PrepareSettings(text, root / "sets", "bytes", holdouts={"held": 0.3}), workers=1)
    prepare(PrepareSettings(text, root / "all", "bytes"), workers=1)
    prepare(PrepareSettings(other, root / "other", "bytes"), workers=1)
    shutil.copytree(root / "all", root / "copy")
    (root / "link").symlink_to(root / "all")
    return root


@pytest.mark.parametrize(
    ("train", "held", "reason"),
    [
        ("sets/train", "sets/held", None),
        ("all", "other", None),
        ("all", "all", "is the training corpus"),
        ("all", "link", "is the training corpus"),
        ("all", "copy", "has 1 of its 1 shards in the training corpus"),
        ("all", "sets/held", "was prepared from an input of the training corpus"),
        ("sets/train", "sets/train", "is the training corpus"),
    ],
)
def test_a_held_out_set_that_shares_text_with_the_training_corpus_is_named(
    corpora: Path, train: str, held: str, reason: str | None
) -> None:
    data = {"train": [{"path": corpora / "other"}, {"path": corpora / train}] if held != "other" else [{"path": corpora / train}]}
    lines = start_warnings(Config.model_validate({"data": data, "evaluation": {"sets": {"v": corpora / held}}}))
    assert [line.startswith(f"warning: evaluation.sets.v {reason}") for line in lines] == [True] * (reason is not None)


@pytest.mark.parametrize(("params", "rounding", "lines"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)])
def test_bfloat16_parameters_without_stochastic_rounding_get_a_hint(corpora: Path, params: str, rounding: bool, lines: int) -> None:
    precision = {"params": params, "stochastic_rounding": rounding}
    found = start_warnings(Config.model_validate({"precision": precision, "data": {"train": [{"path": corpora / "all"}]}}))
    assert [("precision.stochastic_rounding=true" in line) for line in found] == [True] * lines


@pytest.mark.parametrize(("key", "value"), [("lora", {"rank": 2}), ("preference", {"loss": "dpo"})])
def test_adapting_random_parameters_gets_a_hint(corpora: Path, tmp_path: Path, key: str, value: dict[str, Any]) -> None:
    tree = {"data": {"train": [{"path": corpora / "all"}]}, "run_dir": tmp_path / "run", key: value}
    (line,) = start_warnings(Config.model_validate(tree))
    assert line.startswith(f"warning: {key}.{next(iter(value))}=")
    assert "without init_from starts from random parameters" in line
    assert start_warnings(Config.model_validate(tree | {"init_from": tmp_path / "trained"})) == []
    step = step_dir(tmp_path / "run" / "checkpoints", 3)  # of this run, or an import
    step.mkdir(parents=True)
    (step / MANIFEST).touch()
    assert start_warnings(Config.model_validate(tree)) == []


def raises(**_: Any) -> bool:
    raise RuntimeError("No API key configured. Use `wandb login` to log in.\nSee https://example.org")


@pytest.mark.parametrize(
    ("mode", "login", "message"),
    [
        ("online", lambda **_: True, None),
        ("offline", raises, None),
        ("online", raises, "No API key configured"),
        ("online", lambda **_: False, "run `wandb login`"),
    ],
)
def test_wandb_without_a_login_is_one_line_before_the_compile(monkeypatch: Any, mode: str, login: Any, message: str | None) -> None:
    module = SimpleNamespace(login=login, setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode)))
    monkeypatch.setitem(sys.modules, "wandb", module)
    check_writers(LoggingConfig())
    if message is None:
        check_writers(LoggingConfig(wandb_project="p"))
        return
    with pytest.raises(UserError, match=message) as error:
        check_writers(LoggingConfig(wandb_project="p"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("held", "shards", "pack", "share"),
    [(range(60), 3, None, "100%"), (range(60), 2, 64, "100%"), (range(40, 100), 2, None, "33%"), (range(60, 100), 2, None, None)],
)
def test_documents_are_found_in_other_shards_orders_and_rows(
    tmp_path: Path, held: range, shards: int, pack: int | None, share: str | None
) -> None:
    docs = [doc for doc in random_docs(3, 200) if len(doc.tokens) > 17][:100]
    write_corpus(tmp_path / "train", [docs[:60]], record_tokens=1 << 14)
    chosen = [docs[number] for number in held][::-1]
    write_corpus(tmp_path / "held", [chosen[part::shards] for part in range(shards)], pack_length=pack, record_tokens=1 << 14)
    data = {"train": [{"path": tmp_path / "train"}]}
    lines = start_warnings(Config.model_validate({"data": data, "evaluation": {"sets": {"v": tmp_path / "held"}}}))
    expected = f"warning: evaluation.sets.v shares about {share} of its documents with the training corpus {tmp_path / 'train'}"
    assert [line.startswith(expected) for line in lines] == [True] * (share is not None), lines


def test_what_is_read_of_large_corpora_is_bounded_and_the_share_is_estimated(tmp_path: Path) -> None:
    """A third of the documents of the held-out set are in the training corpus, of which a tenth is read; then the time is over."""
    docs = random_docs(0, 6000, longest=80, vocab_size=5000)
    train = write_corpus(tmp_path / "train", [docs[:2000], docs[2000:5000]], vocab_size=5000, record_tokens=1024)
    held = write_corpus(tmp_path / "held", [docs[4500:]], vocab_size=5000, record_tokens=1024)
    part = sample(tmp_path / "train", train, 60.0, limit_tokens=train.tokens // 10)
    assert 0.09 < part.read_share <= 0.101
    found = overlap(sample(tmp_path / "held", held, 60.0), part)
    assert found.share == pytest.approx(1 / 3, abs=0.12) and found.documents < 1500
    ticks = iter(range(1000))
    assert sample(tmp_path / "train", train, 2.0, clock=lambda: next(ticks)).read_share < 0.5
