"""Preparation: the output depends only on input and settings; errors."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.loaders import inputs
from ridgeline.loaders import prepare as module
from ridgeline.loaders.inputs import InputOptions, Unit
from ridgeline.loaders.loader import open_evaluation_set
from ridgeline.loaders.manifest import Manifest
from ridgeline.loaders.prepare import PrepareSettings, Slice, Summary, divide, prepare
from ridgeline.loaders.records import RecordFields, parse_holdouts
from ridgeline.loaders.shard_work import gzip9_size_bytes
from ridgeline.loaders.token_reader import verify_shards
from ridgeline.loaders.tokenizers import load_tokenizer
from tests.loaders.corpora import manifest, read_documents, texts_of, tree_digests, write_records

WORKER = Path(__file__).with_name("prepare_worker.py")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """About 100 kB of records that divide into many units."""
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 4096)
    return write_records(tmp_path / "source.jsonl", 300)


def run(source: Path, output: Path, **changes: Any) -> Summary:
    options = {name: changes.pop(name) for name in ("workers", "max_bad", "overwrite", "slice") if name in changes}
    settings = replace(PrepareSettings((source,), output, "bytes"), **changes)
    return prepare(settings, **{"workers": 1, **options})


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_corpus_holds_every_document_in_order(source: Path, tmp_path: Path) -> None:
    summary = run(source, tmp_path / "out", shards=3)
    documents = read_documents(tmp_path / "out")
    tokenizer = load_tokenizer("bytes")
    assert [tokenizer.decode(ids) for ids, _ in documents] == texts_of(source)
    assert all(ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id for ids, _ in documents)
    (whole,) = summary.sets
    assert whole.documents == 300
    assert whole.tokens == sum(len(ids) for ids, _ in documents)
    assert whole.text_bytes == sum(len(text.encode()) for text in texts_of(source))
    assert whole.shards == 3
    assert whole.gzip9_bytes is None


def test_holdouts_are_disjoint_stable_and_about_as_large_as_requested(source: Path, tmp_path: Path) -> None:
    holdouts = parse_holdouts(["validation=0.2", "test=0.1"])
    run(source, tmp_path / "a", holdouts=holdouts)
    lines = source.read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    run(tmp_path / "reversed.jsonl", tmp_path / "b", holdouts=holdouts, shards=2)
    tokenizer = load_tokenizer("bytes")
    sets = {
        output: {name: [tokenizer.decode(ids) for ids, _ in read_documents(tmp_path / output / name)] for name in ("train", *holdouts)}
        for output in "ab"
    }
    for name, texts in sets["a"].items():
        assert set(texts) == set(sets["b"][name])
    everything = [text for texts in sets["a"].values() for text in texts]
    assert sorted(everything) == sorted(texts_of(source))
    assert 35 < len(sets["a"]["validation"]) < 85
    assert 12 < len(sets["a"]["test"]) < 50


def test_equal_documents_land_in_one_set(tmp_path: Path) -> None:
    records = [json.dumps({"text": f"document {index % 40}"}) for index in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    run(tmp_path / "a.jsonl", tmp_path / "out", holdouts=parse_holdouts(["validation=0.3"]))
    sets = [{tuple(ids) for ids, _ in read_documents(tmp_path / "out" / name)} for name in ("train", "validation")]
    assert not sets[0] & sets[1]


def test_workers_never_change_the_output(source: Path, tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        run(source, tmp_path / f"out{workers}", shards=6, workers=workers, holdouts=parse_holdouts(["validation=0.1"]), gzip_baseline=True)
    first = tree_digests(tmp_path / "out1")
    assert len(first) > 8
    assert tree_digests(tmp_path / "out2") == first
    assert tree_digests(tmp_path / "out3") == first


def test_slices_and_a_merge_make_what_one_process_makes(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole", shards=7)
    for index in (2, 0, 1):
        summary = run(source, tmp_path / "sliced", shards=7, slice=Slice(index, 3))
        assert summary.sets == ()
        assert not (tmp_path / "sliced" / "manifest.json").exists()
    merged = run(source, tmp_path / "sliced", shards=7)
    assert (merged.kept_shards, merged.made_shards) == (7, 0)
    assert tree_digests(tmp_path / "sliced") == tree_digests(tmp_path / "whole")


@pytest.fixture(scope="module")
def large_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory of files large enough to be killed in, and the digests of its uninterrupted output."""
    directory = tmp_path_factory.mktemp("large")
    (directory / "in").mkdir()
    for index in range(12):
        write_records(directory / "in" / f"{index:02d}.jsonl", 4000, seed=index)
    subprocess.run([sys.executable, str(WORKER), str(directory / "in"), str(directory / "whole"), "2", "12"], check=True)
    yield directory / "in", tree_digests(directory / "whole")
    shutil.rmtree(directory)


def test_slices_run_at_the_same_time(large_source: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    source, expected = large_source
    command = [sys.executable, str(WORKER), str(source), str(tmp_path / "out"), "1", "12"]
    slices = [subprocess.Popen([*command, str(index), "3"], stdout=subprocess.PIPE, text=True) for index in range(3)]
    assert [process.communicate(timeout=120)[0] for process in slices] == ["0 4\n"] * 3
    assert subprocess.check_output(command, text=True) == "12 0\n"
    assert tree_digests(tmp_path / "out") == expected


@pytest.mark.parametrize("finished_before", [0, 3, 8])
def test_killed_in_the_middle_then_resumed_is_byte_identical(
    large_source: tuple[Path, dict[str, str]], tmp_path: Path, finished_before: int
) -> None:
    source, expected = large_source
    output = tmp_path / "out"
    command = [sys.executable, str(WORKER), str(source), str(output), "2", "12"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list(output.glob(".prepare/finished-*.json"))) >= finished_before and list(output.glob(".prepare/partial-*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "train" / "manifest.json").exists()
    wait_for(lambda: not children_writing(output))
    kept, made = map(int, subprocess.check_output(command, text=True).split())
    assert kept >= finished_before
    assert made > 0
    assert kept + made == 12
    assert tree_digests(output) == expected
    assert [path.name for path in (output / ".prepare").iterdir() if not path.name.startswith("lock")] == ["state.json"]


def children_writing(output: Path) -> list[int]:
    """Processes that have a file of the output open: orphans of a killed run."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                targets = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
            except OSError:
                continue
            if any(target.startswith(str(output)) for target in targets):
                found.append(int(process.name))
    return found


def wait_for(condition: Callable[[], object], limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.002)


def test_interrupt_keeps_finished_shards_and_leaves_no_process(large_source: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    source, expected = large_source
    output = tmp_path / "out"
    command = [sys.executable, str(WORKER), str(source), str(output), "2", "12"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: list(output.glob(".prepare/finished-*.json")))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    assert process.wait(timeout=60) != 0
    assert not children_writing(output)
    assert int(subprocess.check_output(command, text=True).split()[0]) >= 1
    assert tree_digests(output) == expected


def test_a_damaged_finished_shard_is_made_again(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole", shards=4)
    for index in range(2):
        run(source, tmp_path / "out", shards=4, slice=Slice(index, 2))
    victim = sorted((tmp_path / "out").glob("*.array_record"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    summary = run(source, tmp_path / "out", shards=4)
    assert (summary.kept_shards, summary.made_shards) == (3, 1)
    assert tree_digests(tmp_path / "out") == tree_digests(tmp_path / "whole")


@pytest.mark.parametrize("file_format", ["auto", "text"])
def test_an_output_within_the_input_is_no_input(tmp_path: Path, file_format: str) -> None:
    """`--input . --output data/x`: neither the end of the same run nor a second one reads the shards."""
    (tmp_path / "a.txt").write_text("one text")
    settings = PrepareSettings((tmp_path,), tmp_path / "data" / "x", "bytes", options=InputOptions(format=file_format))
    first = prepare(settings, workers=1)
    before = tree_digests(settings.output)
    again = prepare(settings, workers=1)
    assert [made.documents for made in first.sets] == [1]
    assert again.already_done
    assert tree_digests(settings.output) == before


def test_a_complete_corpus_is_reported_and_not_changed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(source, tmp_path / "out", shards=3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(module, "run_tasks", None)
    again = run(source, tmp_path / "out", shards=3, workers=2)
    assert again.already_done
    assert not first.already_done
    assert again.sets == first.sets
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_a_complete_corpus_that_lost_a_shard_is_not_reported_as_complete(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", shards=3)
    sorted((tmp_path / "out").glob("*.array_record"))[1].unlink()
    assert "missing shard" in refusal(lambda: run(source, tmp_path / "out", shards=3))
    run(source, tmp_path / "out", shards=3, overwrite=True)
    assert len(read_documents(tmp_path / "out")) == 300


def test_other_settings_or_input_are_refused_until_overwritten(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(source, output, shards=3)
    before = tree_digests(output)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"shards": 4}, "shards 3, now 4"),
        ({"shards": 3, "gzip_baseline": True}, "gzip_baseline false, now true"),
        ({"shards": 3, "holdouts": {"validation": 0.1}}, 'holdouts {}, now {"validation": 0.1}'),
        ({"shards": 3, "options": InputOptions(format="lines")}, 'format "auto", now "lines"'),
    ]
    for change, message in changes:
        assert message in refusal(lambda change=change: run(source, output, **change))  # type: ignore[misc]
    with source.open("a") as stream:
        stream.write('{"text": "more"}\n')
    assert "a file was changed, added or removed" in refusal(lambda: run(source, output, shards=3))
    assert tree_digests(output) == before
    assert run(source, output, shards=4, overwrite=True).sets[0].documents == 301
    assert len(list(output.glob("*.array_record"))) == 4


def test_overwriting_changes_between_one_set_and_several(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(source, output, holdouts=parse_holdouts(["validation=0.2"]))
    run(source, output, overwrite=True)
    assert not (output / "train").exists()
    run(source, output, holdouts=parse_holdouts(["test=0.2"]), overwrite=True)
    assert sorted(path.name for path in output.iterdir()) == [".prepare", "test", "train"]


def test_directories_with_other_files_are_never_changed(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run(source, home / "corpus", shards=2)
    (home / "corpus" / ".prepare").rename(tmp_path / "state")  # as if another program had made it
    (home / "notes.txt").write_text("keep")
    before = tree_digests(home)
    assert "another corpus" in refusal(lambda: run(source, home / "corpus"))
    assert "another corpus" in refusal(lambda: run(source, home))
    assert "(corpus, notes.txt)" in refusal(lambda: run(source, home, overwrite=True))
    assert "is a file" in refusal(lambda: run(source, home / "notes.txt"))
    assert tree_digests(home) == before


def test_two_runs_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", slice=Slice(0, 2), shards=2)
    with (tmp_path / "out" / ".prepare" / "lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "another process is preparing" in refusal(lambda: run(source, tmp_path / "out", shards=2))
    assert run(source, tmp_path / "out", shards=2).kept_shards == 1


def test_bad_records_are_counted_listed_and_limited(source: Path, tmp_path: Path) -> None:
    lines = source.read_text().splitlines()
    for index in (4, 120, 290):
        lines.insert(index, "{broken")
    source.write_text("\n".join(lines))
    summary = run(source, tmp_path / "out", shards=3, workers=2, max_bad=3)
    assert summary.bad == 3
    assert [place for place, _ in summary.bad_examples] == [f"{source}:{line}" for line in (5, 121, 291)]
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()]
    assert [(record["place"], record["reason"]) for record in listed] == list(summary.bad_examples)
    message = refusal(lambda: run(source, tmp_path / "limited", shards=3, max_bad=2))
    assert message.startswith(f"more than 2 bad records (--max-bad); the last: {source}:291: invalid JSON at column 2")
    assert run(source, tmp_path / "limited", shards=3, max_bad=3).kept_shards >= 2, "a higher limit continues"
    assert tree_digests(tmp_path / "limited") == tree_digests(tmp_path / "out")


def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": 1}\n')
    output = tmp_path / "out"
    assert "empty corpus: no text in " in refusal(lambda: run(tmp_path / "a.jsonl", output))
    assert not output.exists()
    (tmp_path / "a.jsonl").write_text("")
    assert "empty corpus" in refusal(lambda: run(tmp_path / "a.jsonl", output))
    (tmp_path / "a.jsonl").write_text('{"text": "only one"}\n')
    assert "'v' has none of the 1 documents" in refusal(lambda: run(tmp_path / "a.jsonl", output, holdouts=parse_holdouts(["v=0.000001"])))
    assert not output.exists()


def test_numbers_out_of_range_are_refused(source: Path, tmp_path: Path) -> None:
    for change, message in [
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"shards": 1000}, "--shards 1000: "),
        ({"workers": -1}, "workers must be at least 1"),
        ({"max_bad": -1}, "max bad must be at least 0"),
        ({"pack_length": 1}, "pack length must be at least 2"),
        ({"slice": Slice(3, 3)}, "slice 3/3: the first number must be in 0..2"),
        ({"slice": Slice(0, 2), "overwrite": True}, "--overwrite with a slice"),
        ({"tokenizer": str(tmp_path / "none.json")}, "tokenizer not found"),
    ]:
        assert message in refusal(lambda change=change: run(source, tmp_path / "out", **change))  # type: ignore[misc]


def test_unwritable_output_is_one_clear_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write " in refusal(lambda: run(source, tmp_path / "file" / "out"))


def test_full_disk_is_one_clear_line_and_the_same_command_continues(source: Path, tmp_path: Path) -> None:
    """A limit on file size stands in for a full disk: both fail in write(2)."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, resource.RLIM_INFINITY));"
        f"import runpy, sys; sys.argv = {[str(WORKER), str(source), str(tmp_path / 'out'), '1', '1']!r};"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("refused: cannot write ")
    assert os.strerror(errno.EFBIG) in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.count(str(tmp_path)) == 1
    subprocess.run([sys.executable, str(WORKER), str(source), str(tmp_path / "out"), "1", "1"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, str(WORKER), str(source), str(tmp_path / "whole"), "1", "1"], check=True, stdout=subprocess.DEVNULL)
    assert tree_digests(tmp_path / "out") == tree_digests(tmp_path / "whole")


def test_fine_tuning_masks_decode_to_the_completions(tmp_path: Path) -> None:
    pairs = [("Hi ", "Hello 🙂!\n"), ("Größe", "5 µm"), ("2+2=", "4")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    run(tmp_path / "a.jsonl", tmp_path / "out", fields=RecordFields(sft=True))
    tokenizer = load_tokenizer("bytes")
    documents = read_documents(tmp_path / "out")
    replies = [tokenizer.decode([i for i, counts in zip(ids, mask, strict=True) if counts]) for ids, mask in documents]
    assert replies == [completion for _, completion in pairs]
    for ids, mask in documents:
        assert not mask[0], "BOS has no loss"
        assert ids[-1] == tokenizer.eos_id
        assert mask[-1], "EOS has loss"


def test_packed_rows_hold_whole_documents(source: Path, tmp_path: Path) -> None:
    summary = run(source, tmp_path / "out", shards=2, pack_length=512)
    described = manifest(tmp_path / "out")
    assert described["pack_length"] == 512
    tokenizer = load_tokenizer("bytes")
    assert max(len(text.encode()) for text in texts_of(source)) <= 510, "no document is split"
    assert sorted(tokenizer.decode(ids) for ids, _ in read_documents(tmp_path / "out")) == sorted(texts_of(source))
    (whole,) = summary.sets
    assert whole.padding_share is not None
    assert 0 < whole.padding_share < 0.1


def test_the_manifest_records_settings_and_tokenizer(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", holdouts=parse_holdouts(["validation=0.2"]), shards=2)
    described = Manifest.read(tmp_path / "out" / "validation")
    tokenizer = load_tokenizer("bytes")
    assert described.tokenizer.sha256 == tokenizer.sha256 == load_tokenizer(tmp_path / "out" / "validation" / "tokenizer").sha256
    assert described.parameters["holdouts"] == {"validation": 0.2}
    assert described.parameters["inputs"] == [str(source)]
    verify_shards(tmp_path / "out" / "validation", described)


def test_gzip_sizes_are_those_of_the_gzip_command(source: Path, tmp_path: Path) -> None:
    for index, text in enumerate(["", "x", "ab" * 5000, source.read_text()]):
        path = tmp_path / f"{index}.txt"
        path.write_text(text)
        size = len(subprocess.run(["gzip", "-9", "-n", "-c", str(path)], check=True, capture_output=True).stdout)
        assert abs(gzip9_size_bytes(text.encode()) - size) <= max(2, size // 500)
    summary = run(source, tmp_path / "out", gzip_baseline=True)
    assert summary.sets[0].gzip9_bytes == sum(len(gzip.compress(text.encode(), 9, mtime=0)) for text in texts_of(source))
    assert manifest(tmp_path / "out")["gzip9_bytes"] == summary.sets[0].gzip9_bytes


def test_input_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.run_tasks

    def append(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        with source.open("a") as stream:
            stream.write('{"text": "late"}\n')

    monkeypatch.setattr(module, "run_tasks", append)
    assert "the input changed while it was read" in refusal(lambda: run(source, tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("sizes", [[1] * 10, [100] + [1] * 9, [1] * 9 + [100], [0] * 10, [5, 0, 0, 50, 1, 1, 1, 80, 2, 9]])
def test_units_are_split_into_contiguous_shards_none_empty(sizes: list[int], shards: int) -> None:
    units = [Unit(Path(str(index)), "text", size) for index, size in enumerate(sizes)]
    divided = divide(units, shards)
    assert len(divided) == shards
    assert all(divided)
    assert [unit for part in divided for unit in part] == units


def test_equal_units_are_split_evenly() -> None:
    units = [Unit(Path(str(index)), "text", 10) for index in range(12)]
    assert [len(part) for part in divide(units, 4)] == [3, 3, 3, 3]


def test_the_number_of_shards_follows_the_size() -> None:
    def shards(count: int, unit_bytes: int) -> int:
        return len(divide([Unit(Path("x"), "jsonl", unit_bytes)] * count, None))

    assert shards(1, 10) == 1
    assert shards(10, 1 << 20) == 3
    assert shards(1000, 4 << 20) == 16
    assert shards(3, 1 << 30) == 3, "a compressed file cannot be split"
    assert shards(4000, 4 << 20) == 63


def test_counted_bytes_are_those_of_the_text_with_loss(tmp_path: Path) -> None:
    rows = [{"prompt": "a long prompt ", "completion": "ä!"}, {"prompt": "", "completion": "xyz"}]
    text = tmp_path / "sft.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = RecordFields(sft=True)
    for add_bos, counted in ((True, 3 + 3), (False, 3 + 2)):  # without BOS nothing predicts the x
        output = tmp_path / str(add_bos)
        prepare(PrepareSettings((text,), output, "bytes", fields=sft, add_bos=add_bos), workers=1)
        manifest = Manifest.read(output)
        assert manifest.counted_bytes == counted < manifest.text_bytes
        held_out = open_evaluation_set(output, seq_len=16, batch_size=2, rows=np.arange(2))
        assert held_out.text_bytes == counted
        targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in held_out])
        assert (targets < 256).sum() == counted  # the tokens are bytes
    text.write_text("".join(json.dumps({"text": f"plain {i}"}) + "\n" for i in range(3)))
    prepare(PrepareSettings((text,), tmp_path / "plain", "bytes"), workers=1)
    plain = Manifest.read(tmp_path / "plain")
    assert plain.counted_bytes == plain.text_bytes
    assert all("counted_bytes" not in shard for shard in plain.to_json()["shards"])  # the digests of earlier corpora stay
    assert "add_bos" not in plain.to_json()["tokenizer"]
