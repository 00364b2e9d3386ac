"""s3:// and gs:// against servers on this machine: inputs of the loaders, and copies of checkpoints. `make test-stores` installs them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.errors import UserError
from ridgeline.launch.cluster.network import free_port
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.repair import repair
from ridgeline.trainer.checkpoint.seal import seal
from ridgeline.trainer.checkpoint.store import Store
from tests.loaders.corpora import tree_digests

SERVERS = {
    "s3": ["moto.server", "-H", "127.0.0.1", "-p", "PORT"],
    "gs": ["gcp_storage_emulator", "start", "--host=127.0.0.1", "--port=PORT", "--in-memory"],
}
"""Protocol -> module and arguments of its server."""


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of a server that listens on this machine; endpoint and credentials as the store's own tools take them."""
    protocol: str = request.param
    port = free_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "RIDGE_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", *(word.replace("PORT", str(port)) for word in SERVERS[protocol])]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(300):
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            fsspec.filesystem(protocol).mkdir("bucket")
            yield f"{protocol}://bucket"
        finally:
            server.kill()
            server.wait()


def system_of(url: str) -> Any:
    return fsspec.filesystem(url.partition("://")[0])


def test_a_corpus_from_a_store_is_that_of_the_local_files(bucket: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.txt").write_text(f"text {number}\n" * (1 + 4000 * number))
    system = system_of(bucket)
    system.put(f"{texts}/", "bucket/texts/", recursive=True)
    prepare(PrepareSettings((texts,), tmp_path / "local", "bytes", shards=2), workers=1)
    prepare(PrepareSettings((f"{bucket}/texts",), tmp_path / "remote", "bytes", shards=2), workers=2)
    local, remote = (tree_digests(tmp_path / name) for name in ("local", "remote"))
    shards = {name: digest for name, digest in local.items() if not name.endswith(".json")}
    assert len(shards) >= 2 and shards.items() <= remote.items()
    with pytest.raises(UserError, match="not found"):
        prepare(PrepareSettings((f"{bucket}/nothing",), tmp_path / "none", "bytes"), workers=1)


def make_run(directory: Path) -> Path:
    """A run with three checkpoints; one file is larger than a part of a multipart upload."""
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "tokenizer" / "tokenizer.json").write_text("{}")
    (directory / "run.json").write_text('{"format": 1, "name": "run", "id": "this-run", "starts": []}')
    dirs.create(directory / "checkpoints")
    for step in (1, 2, 3):
        path = dirs.step_dir(directory / "checkpoints", step)
        (path / "d").mkdir(parents=True)
        (path / "d" / "0").write_bytes(os.urandom((60 << 20) if step == 3 else 1000))
        (path / "empty").write_bytes(b"")
        seal(path, {"step": step, "finite": True, "run": "this-run"}, Agreement("test"))
    return directory


def test_checkpoints_are_copied_continued_verified_and_restored(bucket: str, tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"{bucket}/copies/run"
    assert cli.run(["checkpoint", "copy", str(run), url]) == 0
    store = Store(url)
    assert store.steps() == [1, 2, 3]
    assert [store.copy(run / "checkpoints", step).size_bytes for step in (1, 2, 3)] == [0, 0, 0]
    system = system_of(bucket)
    system.rm_file("bucket/copies/run/step_00000003/integrity.json")  # interrupted, and with a damaged file
    damaged = bytearray(system.cat_file("bucket/copies/run/step_00000003/d/0"))
    damaged[12345] ^= 1
    system.pipe_file("bucket/copies/run/step_00000003/d/0", bytes(damaged))
    assert Store(url).steps() == [1, 2]
    assert Store(url).copy(run / "checkpoints", 3).size_bytes == 60 << 20
    restored = tmp_path / "restored"
    assert cli.run(["checkpoint", "copy", url, str(restored)]) == 0
    for path in (path for path in dirs.step_dir(run / "checkpoints", 3).rglob("*") if path.is_file()):
        assert (restored / path.relative_to(run)).read_bytes() == path.read_bytes()
    assert (restored / "tokenizer" / "tokenizer.json").read_text() == "{}"
    # a damaged shard comes back from the copy
    step = dirs.step_dir(run / "checkpoints", 3)
    shutil.copyfile(step / "metadata.json", step / "d" / "0")
    report = repair(run / "checkpoints", [Store(url)])
    assert not report.lost and [action.kind for action in report.actions] == ["replaced"]
    assert integrity.verify(step) == []
    Store(url).delete(3)
    assert Store(url).steps() == [1, 2] and not system.find("bucket/copies/run/step_00000003")


def test_what_the_server_refuses_is_one_line(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, missing = make_run(tmp_path / "run"), bucket.replace("bucket", "no-such-bucket/run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.loaders.remote.WAIT_S", 0.0)
        assert cli.run(["checkpoint", "copy", str(run), missing]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and missing in error
