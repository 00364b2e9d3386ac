"""Inputs from stores and servers: the same bytes as local files, a cache, and copies that continue where they stopped."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.loaders import remote
from ridgeline.loaders.inputs import InputOptions, list_inputs
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.readers import read_unit
from ridgeline.loaders.records import BadRecord, Document, RecordFields
from tests.loaders.corpora import tree_digests, write_records


class Store(http.server.BaseHTTPRequestHandler):
    """Serves files with ranges; breaks off every answer after `budget` bytes in all."""

    files: dict[str, bytes] = {}
    budget: int | None = None
    ranges: list[tuple[int, int]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        data = self.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start, stop = 0, len(data)
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        if body:
            type(self).ranges.append((start, stop))
            sent = data[start:stop] if Store.budget is None else data[start:stop][: Store.budget]
            if Store.budget is not None:
                Store.budget -= len(sent)
            self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


class Hub(Store):
    """Serves the files under /data of a data set of a Hugging Face hub: what huggingface_hub requests to list and read it."""

    def _answer(self, body: bool) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        api, content = "/api/datasets/owner/name", "/datasets/owner/name/resolve/main"
        if path.startswith(content):
            self.path = path.removeprefix(content)
            super()._answer(body)
        elif path == api:
            self._send({"id": "owner/name", "sha": "0" * 40})
        elif path.startswith(f"{api}/tree/main"):
            below = path.removeprefix(f"{api}/tree/main").rstrip("/") + "/"
            entries: dict[str, dict[str, Any]] = {}
            for name, data in self.files.items():
                first, *rest = name.removeprefix(below).split("/") if name.startswith(below) else [""]
                if rest and first:
                    entries[first] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{below}{first}"[1:]}
                if first and (not rest or "recursive=true" in self.path):
                    entries[name] = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name[1:]}
            self._send(list(entries.values()) or None)
        else:
            self._send(None)

    def _send(self, answer: Any) -> None:
        self.send_response(200 if answer else 404)
        text = json.dumps(answer or {}).encode()
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-Error-Code", "" if answer else "EntryNotFound" if "/tree/" in self.path else "RepoNotFound")
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("RIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAIT_S", 0.0)
    monkeypatch.setattr(remote, "CHUNK_BYTES", 1000)
    yield from serve(Store)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("RIDGE_CACHE", str(tmp_path / "cache"))
    for url in serve(Hub):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_ENDPOINT", url)  # of worker processes
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield
    huggingface_hub.HfFileSystem.clear_instance_cache()


def serve(kind: type[Store]) -> Iterator[str]:
    Store.files, Store.budget, Store.ranges = {}, None, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_interrupted_copy_continues_and_has_the_same_bytes(store: str) -> None:
    data = bytes(range(256)) * 40
    Store.files = {"/a.jsonl": data}
    Store.budget = 4500
    _, (file,) = remote.list_remote(f"{store}/a.jsonl")
    with pytest.raises(UserError, match=r"cannot read http://.*/a.jsonl: .*run the same command again to continue"):
        remote.fetch(file)
    assert not file.path.exists()
    Store.budget, Store.ranges = None, []
    assert remote.fetch(file).read_bytes() == data
    assert min(start for start, _ in Store.ranges) == 4000, "what was copied is not copied again"
    Store.ranges = []
    assert remote.fetch(file).read_bytes() == data
    assert not Store.ranges, "the cache serves the second read"


def test_a_file_that_changes_is_copied_again(store: str) -> None:
    Store.files = {"/a.jsonl": b"x" * 3000}
    first = list_inputs([f"{store}/a.jsonl"], InputOptions())
    (old,) = (file.remote for file in first.files)
    assert old is not None
    Store.files = {"/a.jsonl": b"y" * 3000}
    second = list_inputs([f"{store}/a.jsonl"], InputOptions())
    assert first.fingerprint != second.fingerprint
    with pytest.raises(UserError, match="changed while it was read"):
        remote.fetch(old)
    (new,) = (file.remote for file in second.files)
    assert new is not None
    assert remote.fetch(new).read_bytes() == b"y" * 3000


def test_a_corpus_from_a_server_equals_that_of_the_local_file(store: str, tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", 200)
    Store.files = {"/data/a.jsonl": source.read_bytes()}
    prepare(PrepareSettings((source,), tmp_path / "local", "bytes", shards=1), workers=1)
    url = f"{store}/data/a.jsonl"
    settings = PrepareSettings((url,), tmp_path / "remote", "bytes", shards=1)
    Store.budget = 2500
    with pytest.raises(UserError, match="cannot read"):
        prepare(settings, workers=1)
    Store.budget = None
    prepare(settings, workers=1)
    local, found = (tree_digests(tmp_path / name) for name in ("local", "remote"))
    assert {**local, "manifest.json": ""} == {**found, "manifest.json": ""}
    described = json.loads((tmp_path / "remote" / "manifest.json").read_text())
    assert described["parameters"]["inputs"] == [url]


def test_a_data_set_of_a_hub_equals_its_files(hub: None, tmp_path: Path) -> None:
    """With huggingface_hub's own file system, which reads hf:// for fsspec."""
    local = tmp_path / "data"
    (local / "sub").mkdir(parents=True)
    for number, name in enumerate(("train-0.jsonl", "sub/train-1.jsonl")):
        source = write_records(local / name, 50, seed=number)
        Store.files[f"/data/{name}"] = source.read_bytes()
    Store.files["/README.md"] = b"x"
    url = "hf://datasets/owner/name/data"
    prepare(PrepareSettings((local,), tmp_path / "local", "bytes", shards=2), workers=1)
    prepare(PrepareSettings((url,), tmp_path / "remote", "bytes", shards=2), workers=1)
    wanted, found = (tree_digests(tmp_path / name) for name in ("local", "remote"))
    assert {**wanted, "manifest.json": ""} == {**found, "manifest.json": ""}
    assert len(Store.ranges) == 2, "each file is copied once, and no other file"
    old = list_inputs([f"{url}/train-0.jsonl"], InputOptions())
    Store.files["/data/train-0.jsonl"] = Store.files["/data/train-0.jsonl"].swapcase()
    assert list_inputs([f"{url}/train-0.jsonl"], InputOptions()).fingerprint != old.fingerprint
    for missing in (f"{url}/none.jsonl", "hf://datasets/owner/other"):
        with pytest.raises(UserError, match=f"input not found: {missing}"):
            list_inputs([missing], InputOptions())


def test_a_directory_in_a_store_is_listed_as_one_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGE_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    local = tmp_path / "data"
    (local / "sub").mkdir(parents=True)
    write_records(local / "train-0.jsonl", 5)
    write_records(local / "test-0.jsonl", 3, seed=1)
    (local / "train-1.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    pyarrow.parquet.write_table(pa.table({"text": ["p", "q", "r"]}), local / "sub" / "train-2.parquet", row_group_size=2)
    (local / "README.md").write_text("x")
    (local / ".hidden.jsonl").write_text("x")
    memory.put(str(local), "/bucket/data", recursive=True)

    def read(place: str | Path, **options: Any) -> tuple[list[str], list[str]]:
        listing = list_inputs([place], InputOptions(**options))
        items = [item for unit in listing.units() for item in read_unit(unit, RecordFields())]
        bad = [str(item.source).rpartition("/")[2] for item in items if isinstance(item, BadRecord)]
        return [item.text for item in items if isinstance(item, Document)], bad

    for options in ({}, {"split": "test"}, {"include": ("*.jsonl",)}, {"exclude": ("sub", "*-1.jsonl")}):
        assert read("memory://bucket/data", **options) == read(local, **options)
    assert read("memory://bucket/data")[1] == ["train-1.jsonl:2"]
    listing = list_inputs(["memory://bucket/data"], InputOptions())
    (item,) = [item for unit in listing.units() for item in read_unit(unit, RecordFields()) if isinstance(item, BadRecord)]
    assert str(item.source).startswith("memory://"), "messages name the URL and not its copy"
    assert read(f"file://{local}") == read(local)
    for url, message in [
        ("memory://bucket/nothing", "input not found: memory://bucket/nothing"),
        ("s4://bucket/x", "s4://bucket/x: Protocol not known: s4"),
    ]:
        with pytest.raises(UserError, match=message):
            list_inputs([url], InputOptions())
