"""The socket of local checkpoints: members get their parts whatever strangers and damaged members send, in bounded threads and files."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.trainer.checkpoint import integrity, neighbor
from ridgeline.trainer.checkpoint.neighbor import PeerServer, fetch, part_dir, send

TOKEN = "5f" * 32
JUNK: list[Any] = [None, True, -1, 2**70, 1e400, float("nan"), "../../x", "", [], {}, [[1]], {"a": []}, "\x00"]


def make_part(root: Path, process: int, step: int, seed: int = 0) -> dict[str, bytes]:
    draw, path = random.Random(seed), part_dir(root, process, step)
    path.mkdir(parents=True)
    files = {f"shard_{number}": draw.randbytes(draw.randint(0, 3_000_000)) for number in range(3)}
    for name, content in files.items():
        (path / name).write_bytes(content)
    digests = integrity.digest_files(path, files, threads=1)
    integrity.write_manifest(path, {name: integrity.FileDigest(len(files[name]), digests[name]) for name in files})
    return files


def message(value: object) -> bytes:
    content = json.dumps(value).encode()
    return struct.pack(">Q", len(content)) + content


def visits(draw: random.Random, manifest: str) -> list[bytes]:
    """What others send: without the token, and with it something that no member sends."""
    token = TOKEN.encode()
    wrong = [b"", b"GET / HTTP/1.1\r\n\r\n", token[:-1], token[:-1] + b"g", b"\xff" * 200, draw.randbytes(5000)]
    deep = b"[" * 200_000
    lengths = [struct.pack(">Q", number) for number in (0, 1, 2**63, 2**64 - 1, 65 << 20)]
    damaged = [token + length + draw.randbytes(8) for length in lengths]
    damaged += [token + struct.pack(">Q", len(deep)) + deep, token + message([1]), token + message("get"), token]
    for junk in JUNK:
        gets = [{"get": each} for each in (junk, [junk, 4], [0, junk])]
        puts = [{"put": junk}, {"put": [junk, junk]}, {"put": [1, 4], "manifest": junk}]
        damaged += [token + message(request) for request in gets + puts]
    changed = json.loads(manifest)
    for _ in range(20):
        text = json.dumps({**changed, draw.choice([*changed, "more"]): draw.choice(JUNK)})
        cut = manifest[: draw.randrange(len(manifest))]
        damaged.append(token + message({"put": [1, 4], "manifest": draw.choice([text, manifest, cut])}))
    return wrong * 3 + damaged


def say(address: tuple[str, int], content: bytes) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.settimeout(10)
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass  # the server closes what it does not want


@pytest.mark.parametrize("seed", range(2))
def test_members_get_their_parts_whatever_else_is_sent(tmp_path: Path, capfd: pytest.CaptureFixture[str], seed: int) -> None:
    draw = random.Random(seed)
    files = make_part(tmp_path / "one", 0, 4)
    make_part(tmp_path / "two", 1, 4, seed=9)
    server = PeerServer("127.0.0.1", TOKEN, tmp_path / "one")
    try:
        contents = visits(draw, (part_dir(tmp_path / "one", 0, 4) / integrity.MANIFEST).read_text())
        draw.shuffle(contents)
        for number, content in enumerate(contents):
            say(server.address, content)
            if number % 40 == 0:
                send(server.address, TOKEN, tmp_path / "two", 1, 4)
        fetched = fetch(server.address, TOKEN, tmp_path / f"three{seed}", 0, 4)
        assert {name: (fetched / name).read_bytes() for name in files} == files
        for wrong in (TOKEN[:-1] + "0", "é" * 32, TOKEN.upper()):
            with pytest.raises(OSError, match=r"the connection ended|reset by peer|Broken pipe"):
                fetch(server.address, wrong, tmp_path / "four", 0, 4)
    finally:
        server.close()
    assert not integrity.verify(part_dir(tmp_path / "one", 1, 4)), "the part that a member sent is complete"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", f"three{seed}", "two"]
    assert {path.name.partition(".")[0] for path in (tmp_path / "one" / "process_00001").iterdir()} == {"step_00000004"}
    assert "Traceback" not in "".join(capfd.readouterr())


def test_connections_that_say_nothing_or_little_keep_no_member_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the server serves at a time: idle ones, and one byte of the token every while."""
    monkeypatch.setattr(neighbor, "TOKEN_S", 1.5)
    files = make_part(tmp_path / "one", 0, 4)
    server, before = PeerServer("127.0.0.1", TOKEN, tmp_path / "one"), threading.active_count()
    stop = threading.Event()
    silent = [socket.create_connection(server.address, 10) for _ in range(3 * neighbor.STRANGERS)]

    def drip() -> None:
        with socket.create_connection(server.address, 10) as connection:
            try:
                while not stop.wait(0.2):
                    connection.sendall(b"5")
            except OSError:
                dropped.append(time.monotonic() - begin)

    begin, dropped = time.monotonic(), list[float]()
    slow = threading.Thread(target=drip, daemon=True)
    slow.start()
    try:
        assert threading.active_count() <= before + neighbor.STRANGERS + 1
        deadline, fetched = time.monotonic() + 30, None
        while fetched is None:
            try:
                fetched = fetch(server.address, TOKEN, tmp_path / "two", 0, 4)
            except OSError:  # refused while strangers hold all places
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert {name: (fetched / name).read_bytes() for name in files} == files
        slow.join(20)
        assert dropped and dropped[0] < 15, "the token must arrive in time as a whole"
    finally:
        stop.set()
        for connection in silent:
            connection.close()
        server.close()
    assert len(os.listdir(tmp_path / "two")) == 1
