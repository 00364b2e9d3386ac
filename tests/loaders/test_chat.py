"""Chat corpora: from records to masked tokens, packed rows, preference pairs and what `ridge data inspect` shows."""

from __future__ import annotations

import datetime
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.loaders.chat import ChatEncoder, EncodedChat
from ridgeline.loaders.chat_template import ChatTemplate, TemplateError, load_chat_template
from ridgeline.loaders.conversations import Conversation, conversation_from_record
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.inspect import sample_conversations
from ridgeline.loaders.manifest import Manifest
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.prepare_state import recorded
from ridgeline.loaders.records import Place, RecordFields, parse_holdouts
from ridgeline.loaders.rows import RowSource
from ridgeline.loaders.tokenizers import ByteTokenizer, load_tokenizer
from ridgeline.models.loss import cross_entropy
from ridgeline.sharding.partition import Partitioner
from tests.loaders.chats import LONG, SHORT, SYSTEM, assistant, template_file, user, write_chat_tokenizer
from tests.loaders.corpora import read_documents, tree_digests

CHAT = RecordFields(chat=True)
RECORDS: list[dict[str, Any]] = [{"messages": messages} for messages in (SHORT, LONG, SYSTEM)]
RECORDS += [{"messages": [user(f"{i}?"), assistant("x" * i)]} for i in range(1, 20)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("qwen"), "chatml")


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def encoded(tokenizer: Path, records: list[dict[str, Any]]) -> list[EncodedChat]:
    encoder = ChatEncoder(load_tokenizer(tokenizer), load_chat_template(tokenizer))
    found = [conversation_from_record(record, Place(Path("x"))) for record in records]
    return [encoder.encode(item) for item in found if isinstance(item, Conversation)]


@pytest.mark.parametrize("pack_length", [None, 256])
def test_a_corpus_has_the_tokens_and_masks_of_its_conversations(tmp_path: Path, qwen: Path, pack_length: int | None) -> None:
    source = write(tmp_path / "a.jsonl", [*RECORDS, {"messages": [user("x")]}])
    summary = prepare(PrepareSettings((source,), tmp_path / "out", str(qwen), fields=CHAT, pack_length=pack_length), workers=1)
    corpus = tmp_path / "out" / "train"
    assert summary.bad == 1
    assert [part.path for part in summary.sets] == [str(corpus)]
    stored = {tuple(ids): mask for ids, mask in read_documents(corpus) if mask is not None}
    expected = encoded(qwen, RECORDS)
    assert len(stored) == len(expected)
    for chat in expected:
        assert stored[tuple(chat.ids.tolist())] == chat.loss_mask.tolist()
    # The rows count exactly the trained tokens, and every conversation is a segment of its own.
    source_of_rows = RowSource(corpus, 256)
    rows = source_of_rows.read(np.arange(source_of_rows.num_rows))
    kept = list(rows["segment_ids"])
    assert int(rows["weights"].sum()) == sum(int(chat.loss_mask.sum()) for chat in expected)
    if pack_length is not None:
        assert sum(int(row.max()) for row in kept) == len(expected)
        assert max(int(row.max()) for row in kept) > 1
        real = rows["segment_ids"] > 0
        assert ((rows["positions"] == 0) & real).sum() == len(expected)
    manifest, tokenizer = Manifest.read(corpus), load_tokenizer(qwen)
    assert manifest.counted_bytes == sum(len(tokenizer.decode(chat.ids[chat.loss_mask].tolist()).encode()) for chat in expected)
    assert load_chat_template(corpus / "tokenizer").text == load_chat_template(qwen).text


def test_inspection_shows_whole_conversations_with_weights_by_token(tmp_path: Path, qwen: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.jsonl", RECORDS)
    arguments = ["data", "prepare", "--chat", "--input", str(source), "--tokenizer", str(qwen), "--output", str(tmp_path / "out")]
    assert cli.run([*arguments, "--workers", "1"]) == 0
    capfd.readouterr()
    inspect = ["data", "inspect", str(tmp_path / "out" / "train"), "--samples"]
    assert cli.run([*inspect, "99", "--json"]) == 0
    samples = json.loads(capfd.readouterr().out)["samples"]
    for sample, chat in zip(samples, encoded(qwen, RECORDS), strict=True):
        assert sample["tokens"] == chat.ids.tolist()
        assert sample["weights"] == chat.loss_mask.astype(float).tolist()
        assert sample["text"] == chat.text
    assert cli.run([*inspect, "1"]) == 0
    assert "in the loss\n<|im_start|>system" in capfd.readouterr().out
    (shown,) = sample_conversations(tmp_path / "out" / "train", Manifest.read(tmp_path / "out" / "train"), count=1)
    assert "".join(text for text, _ in shown.runs) == shown.text
    assert [counts for _, counts in shown.runs][:2] == [False, True]


def test_the_loss_of_a_packed_row_depends_on_the_assistants_tokens_only(tmp_path: Path, qwen: Path) -> None:
    source = write(tmp_path / "a.jsonl", RECORDS)
    prepare(PrepareSettings((source,), tmp_path / "out", str(qwen), fields=CHAT, pack_length=256), workers=1)
    rows = RowSource(tmp_path / "out" / "train", 256).read(np.arange(2))
    vocab = load_tokenizer(qwen).vocab_size
    x_BTD, w_DV = (jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32) for shape in ((2, 256, 8), (8, vocab)))

    def nats(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        single = Partitioner.single()
        sums = cross_entropy(x, w_DV, rows["targets"], rows["weights"], vocab_size=vocab, chunk=512, z_loss=1e-4, partitioner=single)
        return sums.nats + sums.z, sums.weight

    gradient, weight = jax.grad(nats, has_aux=True)(x_BTD)
    chats = {tuple(chat.ids.tolist()): chat.loss_mask for chat in encoded(qwen, RECORDS)}
    expected = np.zeros((2, 256), bool)  # whether the next token is one of the assistant's, in the same conversation
    for row in range(2):
        for segment in range(1, int(rows["segment_ids"][row].max()) + 1):
            (places,) = np.nonzero(rows["segment_ids"][row] == segment)
            expected[row, places[:-1]] = chats[tuple(rows["tokens"][row, places].tolist())][1:]
    assert expected.sum() == float(weight)
    assert (np.abs(np.asarray(gradient)).max(axis=-1) > 0).tolist() == expected.tolist()


def test_the_example_of_the_guide_fits_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/guides/chat.md up to the training, with fewer conversations."""
    root = Path(__file__).parents[2]
    config = load(str(root / "configs/examples/chat-tiny.yaml"), []).config
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["make_chats.py", "data/chats.jsonl", "400"])
    runpy.run_path(str(root / "examples/chat/make_chats.py"), run_name="__main__")
    lines = ["data", "train-tokenizer", "--input", "data/chats.jsonl", "--format", "lines", "--vocab-size", str(config.model.vocab_size)]
    assert cli.run([*lines, "--output", "data/chat-tokenizer/tokenizer.json"]) == 0
    template = str(root / "examples/chat/chat_template.jinja")
    chat = ["data", "prepare", "--chat", "--input", "data/chats.jsonl", "--tokenizer", "data/chat-tokenizer", "--chat-template", template]
    assert cli.run([*chat, "--holdout", "validation=0.05", "--pack-length", "128", "--workers", "1", "--output", "data/chat"]) == 0
    for corpus in (config.data.train[0].path, config.evaluation.sets["validation"]):
        rows = RowSource(Path(corpus), config.data.seq_len)
        assert rows.manifest.tokenizer.vocab_size <= config.model.vocab_size
        (shown,) = sample_conversations(Path(corpus), rows.manifest, count=1)
        assert all(text.endswith("<|eos|>") and " plus " in text for text, counts in shown.runs if counts)
        assert not any("<|eos|>" in text or " is " in text.replace("What is", "") for text, counts in shown.runs if not counts)


class Tomorrow:
    """A calendar that is one day ahead."""

    @staticmethod
    def today() -> datetime.date:
        return datetime.datetime.now().date() + datetime.timedelta(days=1)


def test_a_template_with_the_date_gives_the_same_bytes_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dated = write(tmp_path / "a.jsonl", RECORDS), write_chat_tokenizer(tmp_path / "dated", "chatml")
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}\n" + template.read_text())
    settings = PrepareSettings((source,), tmp_path / "out", str(dated), fields=CHAT, holdouts=parse_holdouts(["validation=0.2"]))
    prepare(settings, workers=1)
    date, digests = recorded(tmp_path / "out")["chat"]["date"], tree_digests(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("ridgeline.loaders.chat_template.datetime.date", Tomorrow)
        assert load_chat_template(dated).date != date
        assert prepare(settings, workers=1).already_done
    assert tree_digests(tmp_path / "out") == digests
    assert load_chat_template(dated, date="2026-01-31").render(SHORT).text.startswith("31 Jan 2026<|im_start|>")


def test_preference_pairs_are_stored_and_read_as_pairs(tmp_path: Path, qwen: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": f"Question {i}?", "chosen": "Yes. " * (i % 5 + 1), "rejected": "No!"} for i in range(12)]
    source = write(tmp_path / "a.jsonl", [*records, {"messages": SHORT}])
    summary = prepare(PrepareSettings((source,), tmp_path / "out", str(qwen), fields=CHAT), workers=1)
    corpus = tmp_path / "out" / "train"
    assert summary.bad == 1
    assert "no preference pair" in summary.bad_examples[0][1]
    sides = [[{"messages": [user(r["prompt"]), assistant(r[side])]} for r in records] for side in ("chosen", "rejected")]
    expected = [encoded(qwen, side) for side in sides]
    lengths = np.array([[len(chat.ids) for chat in side] for side in expected]).max(axis=0)
    seq_len = int(lengths.max()) - 1
    pairs = PairSource(corpus, seq_len)
    kept = np.flatnonzero(lengths <= seq_len)
    assert (pairs.num_pairs, pairs.too_long) == (len(kept), 12 - len(kept))
    for number, side in enumerate(expected):
        rows = pairs.read(2 * np.arange(len(kept)) + number)
        for row, pair in enumerate(kept):
            chat, length = side[pair], len(side[pair].ids)
            assert rows["tokens"][row, :length].tolist() == chat.ids.tolist()
            assert not rows["segment_ids"][row, length:].any()
            assert rows["weights"][row, : length - 1].astype(bool).tolist() == chat.loss_mask[1:].tolist()
            assert not rows["weights"][row, length - 1 :].any()
    with pytest.raises(UserError, match="has preference pairs"):
        RowSource(corpus, seq_len)
    with pytest.raises(UserError, match=r"none of its 12 pairs fits data.seq_len=4"):
        PairSource(corpus, 4)
    shown = list(sample_conversations(corpus, Manifest.read(corpus), count=4))
    assert [row.side for row in shown] == ["chosen", "rejected"] * 2
    with pytest.raises(UserError, match="--pack-length does not apply to preference pairs"):
        prepare(PrepareSettings((source,), tmp_path / "packed", str(qwen), fields=CHAT, pack_length=64))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ messages[0].content.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('Not so') }}", "Not so"),
        ("{{ messages[0].content }} and nothing of the reply", "messages[1]: the chat template does not write its content"),
        ("{% for m in messages | reverse %}{{ m.content }} {% endfor %}", "messages[1]: the assistant's part is not found"),
        ("{% generation %}{% endgeneration %}{{ messages[0].content }}{{ messages[1].content }}", "have no tokens"),
    ],
)
def test_a_template_runs_in_a_sandbox_and_must_show_the_replies(qwen: Path, text: str, reason: str) -> None:
    item = conversation_from_record({"messages": SHORT}, Place(Path("x")))
    assert isinstance(item, Conversation)
    with pytest.raises(TemplateError) as caught:
        ChatEncoder(load_tokenizer(qwen), ChatTemplate(text)).encode(item)
    assert reason in str(caught.value)


BAD: list[tuple[Any, str]] = [
    ("{", "invalid JSON at column"),
    ([1], "expected a JSON object, got a list"),
    ({"text": "x"}, "no fields 'messages' or"),
    ({"messages": [user("a")]}, "no assistant message to learn from"),
    (
        {"messages": [user("a"), {"role": "asistant", "content": "b"}, *SHORT]},
        "messages[1]: unknown role 'asistant'; did you mean 'assistant'?",
    ),
    ({"messages": [user("a"), *SHORT]}, "the chat template refuses it: roles must alternate"),
    ({"messages": [user("a"), assistant("lost")]}, "messages[1]: the chat template does not write its content"),
]


def test_bad_records_are_listed_with_file_line_and_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    strict = write_chat_tokenizer(tmp_path / "strict", "chatml")
    template = strict / "chat_template.jinja"
    refusal = (
        "{% for m in messages[1:] %}{% if m.role == 'user' == messages[loop.index0].role %}{{ raise_exception('roles must alternate') }}"
    )
    text = template.read_text().replace("(message.content or '')", "('' if 'lost' in message.content else message.content)")
    template.write_text(refusal + "{% endif %}{% endfor %}" + text)
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"messages": SHORT}), *(record if isinstance(record, str) else json.dumps(record) for record, _ in BAD)]
    source.write_text("\n".join(lines))
    arguments = ["data", "prepare", "--chat", "--input", str(source), "--tokenizer", str(strict), "--workers", "1", "--output"]
    assert cli.run([*arguments, str(tmp_path / "kept")]) == 0
    listed = capfd.readouterr().err.splitlines()
    for number, (_, reason) in enumerate(BAD, start=2):
        (line,) = [line for line in listed if f"{source}:{number}: " in line]
        assert reason in line
    assert cli.run([*arguments, str(tmp_path / "stopped"), "--max-bad", "0"]) == 2
    assert f"the last: {source}:2: invalid JSON" in capfd.readouterr().err.splitlines()[-1]
    source.write_text(lines[1])
    assert cli.run([*arguments, str(tmp_path / "empty")]) == 2
    assert f"1 bad records; the first: {source}:1: invalid JSON" in capfd.readouterr().err.splitlines()[-1]


def test_lists_of_texts_are_joined_where_the_template_reads_no_lists(qwen: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked, joined = ({"messages": [user(content), SHORT[1]]} for content in (parts, "a\nb"))
    first, second = encoded(qwen, [asked, joined])
    assert first.text == second.text
    shown = ChatTemplate("{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}")
    for content, reason in ((parts, None), ([{"type": "image"}], "does not read a list as the content")):
        item = conversation_from_record({"messages": [user(content), SHORT[1]]}, Place(Path("x")))
        assert isinstance(item, Conversation)
        if reason is None:
            assert ChatEncoder(load_tokenizer(qwen), shown).encode(item).text == "user: a\nb;assistant: Sunny 🙂;"
            continue
        with pytest.raises(TemplateError, match=reason):
            ChatEncoder(load_tokenizer(qwen), shown).encode(item)


def test_marks_of_generation_blocks_cannot_be_forged(qwen: Path) -> None:
    with pytest.raises(TemplateError, match=r"U\+FDD0"):
        load_chat_template(qwen).render([user("a\ufdd0b")])


def test_refusals_name_what_to_do(tmp_path: Path, qwen: Path) -> None:
    source = write(tmp_path / "a.jsonl", RECORDS)

    def refusal(tokenizer: Path, fields: RecordFields = CHAT, **more: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(PrepareSettings((source,), tmp_path / "out", str(tokenizer), fields=fields, **more), workers=1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--chat and --sft exclude each other" in refusal(qwen, RecordFields(chat=True, sft=True))
    assert "the chat template writes BOS" in refusal(qwen, add_bos=True)
    plain = write_chat_tokenizer(tmp_path / "plain", "chatml")
    template = plain / "chat_template.jinja"
    template.write_text("{% if %}")
    assert "chat template 'default', line 1: " in refusal(plain)
    template.unlink()
    assert "no default chat template; choose a file with --chat-template" in refusal(plain)
    assert "chat template not found: nowhere" in refusal(plain, chat_template=Path("nowhere"))
    ByteTokenizer().save(tmp_path / "bytes")
    override = template_file("chatml")
    assert "--chat needs a tokenizer.json; the tokenizer is of kind 'bytes'" in refusal(tmp_path / "bytes", chat_template=override)
