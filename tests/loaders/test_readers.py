"""Every input format yields its documents in order, and file and line of bad records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from ridgeline.configs.errors import UserError
from ridgeline.loaders import inputs
from ridgeline.loaders.inputs import InputOptions, Unit, list_inputs
from ridgeline.loaders.readers import Item, read_unit
from ridgeline.loaders.records import BadRecord, Document, RecordFields


def read(*paths: Path, fields: RecordFields | None = None, **options: Any) -> list[Item]:
    listing = list_inputs(paths, InputOptions(**options))
    return [item for unit in listing.units() for item in read_unit(unit, fields or RecordFields())]


def texts(items: list[Item]) -> list[str]:
    assert not [item for item in items if isinstance(item, BadRecord)]
    return [item.text for item in items if isinstance(item, Document)]


def bad(items: list[Item]) -> list[tuple[str, str]]:
    return [(str(item.source), item.reason) for item in items if isinstance(item, BadRecord)]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":  # several frames, as parallel writers make them
        half = len(data) // 2
        data = b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))
    path.write_bytes(data)
    return path


WORDS = ["first\nline", "Grüße 世界 🙂", "", "x" * 3000]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "ndjson"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = write_jsonl(tmp_path / f"a.{suffix}", [{"text": word, "id": i} for i, word in enumerate(WORDS)])
    items = read(path)
    assert texts(items) == WORDS
    assert [str(item.source) for item in items] == [f"{path}:{line}" for line in range(1, 5)]


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n   \n{"text": "b"}')
    assert texts(read(tmp_path / "a.jsonl")) == ["a", "b"]


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 31, 32, 33, 200, 1 << 20])
@pytest.mark.parametrize("last_newline", [True, False])
def test_blocks_of_a_file_give_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, last_newline: bool
) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.jsonl"
    words = ["é" * (i % 40) for i in range(30)]
    path.write_bytes(
        "\n".join([*(json.dumps({"text": w}, ensure_ascii=False) for w in words), "{bad", '"x"']).encode() + b"\n" * last_newline
    )
    items = read(path)
    assert [item.text for item in items if isinstance(item, Document)] == words
    assert [place for place, _ in bad(items)] == [f"{path}:31", f"{path}:32"]
    assert [str(item.source) for item in items] == [f"{path}:{i}" for i in range(1, 33)]


def test_bad_json_records_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good"}',
        b"{not json",
        b'{"body": "x", "id": 1}',
        b'{"text": 3}',
        b'{"text": null}',
        b'["text"]',
        b'{"text": "\xff"}',
    ]
    path.write_bytes(b"\n".join([*lines, b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": "last"}']))
    items = read(path)
    assert [item.text for item in items if isinstance(item, Document)] == ["good", "last"]
    found = bad(items)
    assert [place for place, _ in found] == [f"{path}:{line}" for line in range(2, 10)]
    expected = ["invalid JSON at column 2", "missing field 'text' (has: body, id)", "not a string but a number", "not a string but null"]
    expected += ["JSON object, got a list", "invalid UTF-8 at byte 10", "lone surrogate", "invalid JSON"]
    for (_, reason), part in zip(found, expected, strict=True):
        assert part in reason


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_compression_stops_with_the_file_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", [{"text": f"{i * 7919}"} for i in range(2000)])
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) * 3 // 4]
    else:
        data[len(data) // 2 :] = b"\0" * (len(data) - len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.jsonl\{suffix}: cannot be read after line \d+"):
        read(path)


def test_text_file_is_one_document_and_lines_are_many(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\n\nvier ü".encode())
    assert texts(read(path)) == ["one\r\ntwo\n\nvier ü"]
    assert texts(read(path, format="lines")) == ["one", "two", "vier ü"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed\n"))
    assert texts(read(tmp_path / "b.txt.gz")) == ["packed\n"]


def parquet_table(column: str = "text") -> pa.Table:
    return pa.table({column: [f"row {i}" for i in range(10)], "id": list(range(10))})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_is_read_by_row_group(tmp_path: Path, kind: pa.DataType) -> None:
    table = parquet_table()
    table = table.set_column(
        0, "text", table["text"].cast(pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else table["text"].cast(kind)
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    units = list_inputs([tmp_path / "a.parquet"], InputOptions()).units()
    assert len(units) == 4
    assert texts(read(tmp_path / "a.parquet")) == [f"row {i}" for i in range(10)]
    (last,) = read_unit(units[3], RecordFields())
    assert str(last.source) == f"{tmp_path}/a.parquet:10"


def test_parquet_bad_rows_and_columns(tmp_path: Path) -> None:
    invalid = pa.array([b"ok", None, b"\xff\xfe", b"end"], pa.binary()).view(pa.string())
    pyarrow.parquet.write_table(pa.table({"text": invalid}), tmp_path / "a.parquet")
    items = read(tmp_path / "a.parquet")
    assert [item.text for item in items if isinstance(item, Document)] == ["ok", "end"]
    assert [place for place, _ in bad(items)] == [f"{tmp_path}/a.parquet:2", f"{tmp_path}/a.parquet:3"]
    with pytest.raises(UserError, match=r"unknown text field 'txt'; did you mean 'text'\?"):
        read(tmp_path / "a.parquet", fields=RecordFields(text="txt"))
    (tmp_path / "b.parquet").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"b\.parquet: not a readable Parquet file"):
        read(tmp_path / "b.parquet")


def write_arrow_stream(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_saved_dataset(root: Path, table: pa.Table) -> None:
    """Lay out what `Dataset.save_to_disk` leaves."""
    for index in range(2):
        write_arrow_stream(root / f"data-{index:05d}-of-00002.arrow", table.slice(index * 5, 5))
    names = [{"filename": f"data-{index:05d}-of-00002.arrow"} for index in range(2)]
    (root / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "f", "_split": None}))
    (root / "dataset_info.json").write_text("{}")


def test_saved_dataset(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "saved", parquet_table())
    (tmp_path / "saved" / "cache-123.arrow").write_bytes(b"left over")
    assert texts(read(tmp_path / "saved")) == [f"row {i}" for i in range(10)]


def test_saved_dataset_dict_needs_a_split_it_has(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    for split in ("train", "test"):
        write_saved_dataset(root / split, pa.table({"text": [f"{split} {i}" for i in range(10)]}))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert texts(read(root))[0] == "train 0"
    assert texts(read(root, split="test"))[-1] == "test 9"
    with pytest.raises(UserError, match=r"split 'dev' not found; choose one with --split \(allowed: train, test\)"):
        read(root, split="dev")


def test_random_access_arrow_files(tmp_path: Path) -> None:
    table = parquet_table()
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert texts(read(tmp_path / "a.arrow")) == [f"row {i}" for i in range(10)]
    (tmp_path / "b.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:100])
    with pytest.raises(UserError, match=r"b\.arrow: not a readable Arrow file"):
        read(tmp_path / "b.arrow")


def test_hub_snapshot_takes_the_training_split(tmp_path: Path) -> None:
    root = tmp_path / "snapshot"
    (root / "data").mkdir(parents=True)
    (root / "README.md").write_text("about")
    (root / ".gitattributes").write_text("")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pyarrow.parquet.write_table(pa.table({"text": [name]}), root / "data" / f"{name}.parquet")
    assert texts(read(root)) == ["train-00000-of-00002", "train-00001-of-00002"]
    assert texts(read(root, split="test")) == ["test-00000-of-00001"]
    assert list_inputs([root], InputOptions()).notes[0].startswith(f"{root}: reading split 'train' of test, train")


def make_tree(root: Path) -> Path:
    for name in ("b.py", "a.py", "pkg/z.py", "pkg/sub/m.py", "pkg/data.bin", "site-packages/x.py", "pkg/__pycache__/c.py", ".git/h.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "pkg/data.bin").write_bytes(b"\xff\0")
    return root


def test_code_directory_is_walked_in_order_with_globs(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree")
    files = read(root, include=("**/*.py",), exclude=("site-packages",))
    assert texts(files) == ["# a.py\n", "# b.py\n", "# pkg/sub/m.py\n", "# pkg/z.py\n"]
    assert texts(read(root, include=("*.py",), exclude=("site-packages/", "pkg/sub"))) == ["# a.py\n", "# b.py\n", "# pkg/z.py\n"]
    assert texts(read(root, include=("pkg/*.py",))) == ["# pkg/z.py\n"]
    assert texts(read(root, include=("[ab].p?",))) == ["# a.py\n", "# b.py\n"]
    assert texts(read(root, include=("[!ab].py",), exclude=("site-*",))) == ["# pkg/sub/m.py\n", "# pkg/z.py\n"]
    assert bad(read(root)) == [(f"{root}/pkg/data.bin", "invalid UTF-8 at byte 0")]


def test_unreadable_file_of_a_tree_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere.py")
    assert bad(read(tmp_path)) == [(f"{tmp_path}/b.py", "cannot be read: No such file or directory")]
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match=r"cannot read .*c\.jsonl: No such file"):
        read(tmp_path, include=("*.jsonl",))


def test_records_beside_other_files_need_a_choice(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree")
    write_jsonl(root / "rows.jsonl", [{"text": "row"}])
    with pytest.raises(UserError, match=r"rows\.jsonl.* a\.py.*--format records.*--format text.*--include"):
        read(root)
    assert texts(read(root, format="records")) == ["row"]
    assert texts(read(root, include=("*.jsonl",))) == ["row"]
    assert '{"text": "row"}\n' in texts(read(root, format="text", exclude=("*.bin",)))


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    for paths, options, message in [
        ((), {}, "no input.*--input"),
        ((tmp_path / "none",), {}, "input not found: .*none"),
        ((tmp_path,), {}, "no files"),
        ((tmp_path,), {"format": "jsnl"}, "unknown format 'jsnl'; did you mean 'jsonl'"),
    ]:
        with pytest.raises(UserError, match=message):
            list_inputs(paths, InputOptions(**options))  # type: ignore[arg-type]
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="no file matches --include/--exclude"):
        list_inputs([tmp_path], InputOptions(include=("*.py",)))
    with pytest.raises(UserError, match="not a record file"):
        list_inputs([tmp_path / "a.txt"], InputOptions(format="records"))


def test_the_fingerprint_changes_with_changed_added_and_removed_files(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree")

    def fingerprint() -> str:
        return list_inputs([root], InputOptions(include=("*.py",))).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    (root / "a.py").write_text("other length")
    second = fingerprint()
    (root / "b.py").unlink()
    third = fingerprint()
    assert len({first, second, third}) == 3


SFT = RecordFields(sft=True)


def loss_text(item: Item) -> list[str]:
    assert isinstance(item, Document)
    return [text for text, counts in item.segments() if counts]


def test_prompt_and_completion_have_loss_on_the_completion(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "x", "id": 3}])
    items = read(path, fields=SFT)
    assert texts(items) == ["2+2=4", "x"]
    assert [loss_text(item) for item in items] == [["4"], ["x"]]


def test_prompt_and_completion_from_tables(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": ["p"], "completion": ["c"], "id": [1]}), tmp_path / "b.parquet")
    assert [loss_text(item) for item in read(tmp_path / "b.parquet", fields=SFT)] == [["c"]]
    pyarrow.parquet.write_table(pa.table({"text": ["p"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"no columns 'prompt' and 'completion' \(has: text\)"):
        read(tmp_path / "c.parquet", fields=SFT)


def test_bad_fine_tuning_records(tmp_path: Path) -> None:
    records = [
        ({"text": "x"}, "no fields 'prompt' and 'completion' (has: text)"),
        ({"messages": []}, "use --chat for messages"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": 1, "completion": "x"}, "'prompt' is not a string but a number"),
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [record for record, _ in records])
    found = bad(read(path, fields=SFT))
    assert len(found) == len(records)
    for (_, reason), (_, part) in zip(found, records, strict=True):
        assert part in reason


def test_units_of_compressed_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 10)
    path = write_jsonl(tmp_path / "a.jsonl.gz", [{"text": "x" * 100}])
    assert list_inputs([path], InputOptions()).units() == [Unit(path, "jsonl", path.stat().st_size)]
