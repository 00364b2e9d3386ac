"""Sends parts of local checkpoints between processes over TCP: a copy to the neighbor at a save, and back at a restore.

Each process listens on its address in the network of JAX's coordinator, and serves its node's directory. A connection begins with the
token of this start, which the processes agree on over the coordination service; one without it is closed. What is received is hashed as it
arrives, and takes its name only when all of it matches the manifest. A message is its length and JSON.

    token, {"get": [process, step]}                             answer: {"manifest"}, then the bytes of its files in order; or {"error"}
    token, {"put": [process, step], "manifest"}, then the bytes      answer: {} or {"error"}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import socket
import socketserver
import struct
import threading
import time
from pathlib import Path
from typing import Any

from ridgeline.rundir.files import make_directory
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity

SILENT_S = 60.0
"""A connection without progress for this long is broken."""
TOKEN_S = 10.0
"""The token must have arrived by then."""
STRANGERS = 32
"""Connections without a token, so far, that are served at a time; others are closed. Those of members are one or two per process."""
_LENGTH = struct.Struct(">Q")
_MAX_MESSAGE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


_REFUSED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, integrity.ManifestDamage)
"""What a message can cause that no process of this version sends."""


class PeerServer:
    """Serves and receives parts below `root` (process_P/step_N).

    Args:
      address: numeric address to listen on; a free port is chosen.
      token: shared by the processes of the run.
      root: of this run in the directory of this node.
    """

    def __init__(self, address: str, token: str, root: Path) -> None:
        parts, places = root, threading.BoundedSemaphore(STRANGERS)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    try:
                        member = hmac.compare_digest(_read(self.request, len(token), TOKEN_S), token.encode())
                    finally:
                        places.release()
                    if member:
                        self.request.settimeout(SILENT_S)
                        _answer(self.request, parts)
                except _REFUSED:
                    return  # the other side sees the end of the connection

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            request_queue_size = 128

            def verify_request(self, request: Any, client_address: Any) -> bool:
                return places.acquire(blocking=False)

        self._server = Server((address, 0), Handler)
        self.address: tuple[str, int] = (address, int(self._server.server_address[1]))
        threading.Thread(target=self._server.serve_forever, name="checkpoint-neighbor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def part_dir(root: Path, process: int, step: int) -> Path:
    """Name the directory of a process's part of a step."""
    return dirs.step_dir(root / f"process_{process:05d}", step)


def send(address: tuple[str, int], token: str, root: Path, process: int, step: int) -> None:
    """Send a part to another process, which verifies and keeps it. Raises OSError."""
    path = part_dir(root, process, step)
    manifest = (path / integrity.MANIFEST).read_bytes()
    with socket.create_connection(address, SILENT_S) as connection:
        connection.sendall(token.encode())
        _write_message(connection, {"put": [process, step], "manifest": manifest.decode()})
        _send_files(connection, path, manifest)
        _raise(_read_message(connection))


def fetch(address: tuple[str, int], token: str, root: Path, process: int, step: int) -> Path:
    """Receive a part that another process has; return its directory. Raises OSError."""
    with socket.create_connection(address, SILENT_S) as connection:
        connection.sendall(token.encode())
        _write_message(connection, {"get": [process, step]})
        answer = _read_message(connection)
        _raise(answer)
        return _receive(connection, root, process, step, answer["manifest"].encode())


def _answer(connection: socket.socket, root: Path) -> None:
    request = _read_message(connection)
    try:
        if "put" in request:
            process, step = map(int, request["put"])
            _receive(connection, root, process, step, request["manifest"].encode())
            _write_message(connection, {})
        else:
            process, step = map(int, request["get"])
            path = part_dir(root, process, step)
            manifest = (path / integrity.MANIFEST).read_bytes()
            _write_message(connection, {"manifest": manifest.decode()})
            _send_files(connection, path, manifest)
    except OSError as error:
        _write_message(connection, {"error": str(error.strerror or error)})


def _send_files(connection: socket.socket, path: Path, manifest: bytes) -> None:
    for name in integrity.parse_manifest(manifest):
        with (path / name).open("rb") as file:
            connection.sendfile(file)


def _receive(connection: socket.socket, root: Path, process: int, step: int, manifest: bytes) -> Path:
    """Write a part while it arrives; it takes its name only when all files match. Raises OSError."""
    path = part_dir(root, process, step)
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_directory(part)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name, entry in integrity.parse_manifest(manifest).items():
        if Path(name).name != name:
            raise OSError(f"{name} is not the name of a file")
        digest, left = hashlib.sha256(), entry.size_bytes
        with (part / name).open("wb", buffering=0) as file:
            while left:
                count = connection.recv_into(buffer[: min(left, _CHUNK_BYTES)])
                if not count:
                    raise ConnectionError("the connection ended")
                digest.update(buffer[:count])
                file.write(buffer[:count])
                left -= count
        if digest.hexdigest() != entry.sha256:
            raise OSError(f"{name} does not match its sha256")
    (part / integrity.MANIFEST).write_bytes(manifest)
    shutil.rmtree(path, ignore_errors=True)
    os.rename(part, path)
    return path


def _write_message(connection: socket.socket, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _read_message(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise OSError("a message is too long")
    found = json.loads(_read(connection, length))
    if not isinstance(found, dict):
        raise OSError("a message is not an object")
    return found


def _read(connection: socket.socket, count: int, limit_s: float | None = None) -> bytes:
    """Receive bytes. limit_s: for all of them together; None: the timeout of the socket for each part. Raises OSError."""
    content, end_s = bytearray(), None if limit_s is None else time.monotonic() + limit_s
    while len(content) < count:
        if end_s is not None:
            connection.settimeout(max(0.001, end_s - time.monotonic()))
        data = connection.recv(min(count - len(content), _CHUNK_BYTES))
        if not data:
            raise ConnectionError("the connection ended")
        content += data
    return bytes(content)


def _raise(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise OSError(str(answer["error"]))
