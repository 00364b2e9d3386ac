"""Frequent checkpoints on each node's own disk, with a copy of each part on the next node.

    <checkpoint.local.directory>/ridge-node.json             identifies the node: processes that see the same file share a node
    <checkpoint.local.directory>/<run id>/process_00003/     parts that process 3 wrote here, or that this node keeps for it

    training thread     agree whether the previous save is done -> copy the shards to the host      (blocking)
    background thread   write and seal the part -> send it to the next node -> agree that all have -> delete older parts

A step is complete when every process's part is on some node. A restore takes the newest complete step that is newer than the newest one
in the run directory; a process whose node lost its part fetches it from the node that has it. A part fits only the same number of
processes and the same sharding; otherwise the run directory's checkpoint is taken.

Lineage: each time training begins at a step, that step is appended to lineage.json in the run's checkpoint directory. A local step counts
only if training never began again before it: a node that was away may hold steps of a course that was given up.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.schema import LocalCheckpointConfig
from ridgeline.rundir.files import make_directory, write_atomically
from ridgeline.trainer.agreement import Agreement, own_address
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity, local_part
from ridgeline.trainer.checkpoint.identity import RUN
from ridgeline.trainer.checkpoint.neighbor import PeerServer, fetch, part_dir, send
from ridgeline.trainer.checkpoint.seal import METADATA, DamagedError, read_metadata

LINEAGE = "lineage.json"
_NODE = "ridge-node.json"
_BRANCH, _LAYOUT, _COUNT, _PROCESS = "local_branch", "local_layout", "local_processes", "local_process"
_OWN = (_BRANCH, _LAYOUT, _COUNT, _PROCESS, local_part.SHARDS)
_CLOSE_S = 30.0

Source = Literal["local", "neighbor"]


@dataclass(frozen=True)
class Candidate:
    """A complete local step."""

    step: int
    holders: list[list[int]]
    """By process: the processes whose node has its part, itself first."""


class LocalTier:
    """Local checkpoints of one run. All processes construct and call it in the same order.

    Args:
      config: checkpoint.local, with a directory.
      run_id: of the run.
      checkpoints: the run's checkpoint directory, for lineage.json (process 0).
      abstract_state: what is saved and restored.
      log: receives warnings, one line each (process 0).
      emit: receives local_checkpoint_saved, local_checkpoint_skipped and local_checkpoint_failed (process 0).
      first_start: of the run.

    Where the directory of a node cannot be written, the run goes on without local checkpoints, with a warning. At the first start that is a
    mistake if it is so in every process: UserError in every process.
    """

    def __init__(
        self,
        config: LocalCheckpointConfig,
        run_id: str,
        checkpoints: Path,
        abstract_state: Any,
        *,
        log: Callable[[str], None],
        emit: Callable[..., None],
        first_start: bool = True,
    ) -> None:
        assert config.directory is not None
        self._config, self._run_id, self._checkpoints = config, run_id, checkpoints
        self._abstract, self._log, self._emit = abstract_state, log, emit
        self._agreement, self._background = Agreement("local-checkpoint"), Agreement("local-checkpoint-background")
        self._process, self._count = self._agreement.process, self._agreement.count
        self._root = config.directory.absolute() / run_id
        self._layout = local_part.layout(abstract_state)
        self._branch = ""
        self._restored: int | None = None
        self._committed: list[int] = []
        self._thread: threading.Thread | None = None
        self._server: PeerServer | None = None
        self._token = self._agreement.first(lambda: secrets.token_hex(32))
        members = self._agreement.each(self._join)
        self._members: list[list[Any]] = self._agreement.first(lambda: members)
        problems = [member[-1] for member in self._members if member[-1]]
        if first_start and len(problems) == self._count:
            raise UserError(problems[0])
        self._usable = not problems
        if problems and self._process == 0:
            log(f"WARNING: {problems[0]}; training continues without local checkpoints")
        self._target = _neighbor([member[0] for member in self._members], self._process) if config.neighbor else None
        if config.neighbor and self._count > 1 and self._target is None and self._process == 0:
            log(f"warning: checkpoint.local: all processes are on one node, or {config.directory} is shared: no copies")

    def due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self._usable and step % self._config.every == 0

    def candidates(self) -> list[Candidate]:
        """Return the complete local steps, newest first."""
        self._wait()
        if not self._usable:
            return []
        scanned = self._agreement.each(lambda: [self._layout, self._scan()])
        found = self._agreement.first(lambda: [asdict(one) for one in _complete(scanned, _lineage(self._checkpoints))])
        return [Candidate(**one) for one in found]

    def restore(self, candidate: Candidate) -> tuple[Any, dict[str, Any], Source]:
        """Return the state and the metadata of a complete step, and where the parts were. Raises PeerError where one cannot be read."""
        states: list[Any] = []
        metadata: dict[str, Any] = {}

        def load() -> bool:
            problems = []
            for holder in candidate.holders[self._process]:
                try:
                    path = part_dir(self._root, self._process, candidate.step)
                    if holder != self._process:
                        path = fetch(self._address(holder), self._token, self._root, self._process, candidate.step)
                    states.append(local_part.read(path, self._abstract))
                    metadata.update(read_metadata(path))
                except (OSError, DamagedError, ValueError, KeyError, TypeError) as error:
                    problems.append(f"process {self._process} from process {holder}: {error}")
                else:
                    return self._members[holder][0] != self._members[self._process][0]
            raise RuntimeError("; ".join(problems))

        away = self._agreement.each(load)
        source: Source = "neighbor" if self._agreement.first(lambda: any(away)) else "local"
        kept = {name: value for name, value in metadata.items() if name not in _OWN}
        self._restored = candidate.step
        return states[0], self._agreement.first(lambda: kept), source

    def begin(self, step: int) -> None:
        """Training begins at `step`: later local steps no longer count. Call it before the first step and after a return to one."""
        self._wait()
        self._branch = self._agreement.first(lambda: _extend_lineage(self._checkpoints, step))
        restored = [] if self._restored is None else [self._restored]
        self._committed = [one for one in self._committed or restored if one <= step]
        self._agreement.each(lambda: self._delete_others(self._committed))

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> bool:
        """Save a state of jax.Arrays in the background; return false where the previous save is still being written.

        The arrays may be donated as soon as this returns. A failure is logged and does not end training.
        """
        running = self._agreement.each(lambda: self._thread is not None and self._thread.is_alive())
        if self._agreement.first(lambda: any(running)):
            self._report("local_checkpoint_skipped", step=step)
            return False
        start_s = time.perf_counter()
        shards = local_part.host_shards(state)
        own = {_BRANCH: self._branch, _LAYOUT: self._layout, _COUNT: self._count, _PROCESS: self._process}
        work = (step, shards, {**metadata, "step": step, **own}, start_s)
        self._thread = threading.Thread(target=self._finish, args=work, name=f"local-checkpoint-{step}", daemon=True)
        self._thread.start()
        return True

    def close(self, *, finished: bool) -> None:
        """Wait for the save in flight. `finished`: the run is complete, and its local checkpoints are deleted."""
        self._wait()
        if finished:
            self._agreement.each(lambda: shutil.rmtree(self._root, ignore_errors=True))
        if self._server is not None:
            self._server.close()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _join(self) -> list[Any]:
        """Return the node of this process, the address of its server, and why its directory cannot be used ("": it can)."""
        directory, node = self._root.parent, ""
        try:
            make_directory(self._root)
            node = _node_id(directory / _NODE)
            if self._count > 1:
                self._server = PeerServer(own_address(), self._token, self._root)
        except OSError as error:
            return [
                node,
                "",
                0,
                f"checkpoint.local.directory: cannot write {directory} on {socket.gethostname()}: {error.strerror or error}",
            ]
        return [node, *(self._server.address if self._server is not None else ("", 0)), ""]

    def _address(self, process: int) -> tuple[str, int]:
        _, host, port, _ = self._members[process]
        return str(host), int(port)

    def _scan(self) -> list[list[Any]]:
        """Return [process, step, processes, layout, branch] of the sealed parts of this run on this node; none of a disk that fails."""
        found: list[list[Any]] = []
        try:
            paths = sorted(self._root.glob("process_*/step_*"))
        except OSError:
            return []
        for path in paths:
            try:
                manifest = integrity.read_manifest(path)
                if integrity.check_listing(path, manifest) or integrity.check_digests(path, manifest, [METADATA], threads=1):
                    continue
                metadata = read_metadata(path)
                if metadata.get(RUN, self._run_id) == self._run_id and path == part_dir(self._root, metadata[_PROCESS], metadata["step"]):
                    found.append([metadata[_PROCESS], metadata["step"], metadata[_COUNT], metadata[_LAYOUT], metadata[_BRANCH]])
            except (integrity.ManifestDamage, DamagedError, OSError, KeyError, TypeError, ValueError):
                continue
        return found

    def _finish(self, step: int, shards: Sequence[local_part.Shard], metadata: Mapping[str, Any], start_s: float) -> None:
        """The background thread. Its outcome is the same in every process."""
        try:
            sizes = self._background.each(lambda: self._write(step, shards, metadata))
            self._background.each(lambda: self._send(step))
            self._committed = [*self._committed, step][-self._config.keep :]
            self._background.each(lambda: self._delete_others(self._committed))
        except Exception as error:
            self._delete_others(self._committed)
            if self._process == 0:
                self._log(f"WARNING: the local checkpoint of step {step} FAILED: {' '.join(str(error).split())[:300]}; training continues")
            self._report("local_checkpoint_failed", step=step, error=str(error)[:300])
        else:
            self._report("local_checkpoint_saved", step=step, size_bytes=sum(sizes), total_s=time.perf_counter() - start_s)

    def _write(self, step: int, shards: Sequence[local_part.Shard], metadata: Mapping[str, Any]) -> int:
        path = part_dir(self._root, self._process, step)
        shutil.rmtree(path, ignore_errors=True)  # of a course that was given up
        return local_part.write(path, shards, metadata)

    def _send(self, step: int) -> None:
        if self._target is not None:
            send(self._address(self._target), self._token, self._root, self._process, step)

    def _delete_others(self, steps: Sequence[int]) -> None:
        """Delete all other parts on this node. No save is in flight: the next one begins after all processes have done this."""
        kept = {dirs.step_dir(Path(), step).name for step in steps}
        try:
            found = list(self._root.glob("process_*/step_*"))
        except OSError:  # the file system is away
            return
        for path in found:
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _report(self, kind: str, **fields: Any) -> None:
        if self._process == 0:
            self._emit(kind, **fields)


def _neighbor(nodes: Sequence[str], process: int) -> int | None:
    """Return the process on the next node to which a process sends its part; None with one node."""
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    members = {node: [other for other, its in enumerate(nodes) if its == node] for node in order}
    following = members[order[(order.index(nodes[process]) + 1) % len(order)]]
    return following[members[nodes[process]].index(process) % len(following)]


def _complete(scanned: Sequence[Sequence[Any]], lineage: Sequence[tuple[str, int]]) -> list[Candidate]:
    """Return the complete steps, newest first, of what each process has found: [its layout, its parts] by process."""
    count, holders = len(scanned), dict[tuple[int, str], list[list[int]]]()
    order = [branch for branch, _ in lineage]
    for finder, (_, parts) in enumerate(scanned):
        for process, step, processes, layout, branch in parts:
            if processes != count or not 0 <= process < count or layout != scanned[process][0] or branch not in order:
                continue
            if all(begun >= step for _, begun in lineage[order.index(branch) + 1 :]):
                holders.setdefault((step, branch), [[] for _ in range(count)])[process].append(finder)
    return [
        Candidate(step, [[p] * (p in finders) + [finder for finder in finders if finder != p] for p, finders in enumerate(found)])
        for (step, _), found in sorted(holders.items(), key=lambda item: -item[0][0])
        if all(found)
    ]


def _lineage(checkpoints: Path) -> list[tuple[str, int]]:
    """Return (branch, step at which it began) in order; [] where it is not known: no local step counts then. Process 0."""
    try:
        found = json.loads(read_limited(checkpoints / LINEAGE))["branches"] if (checkpoints / LINEAGE).exists() else []
        return [(str(branch), int(step)) for branch, step in found]
    except (UserError, ValueError, KeyError, TypeError):
        return []


def _extend_lineage(checkpoints: Path, step: int) -> str:
    """Append a branch to the lineage and return it. Process 0."""
    dirs.create(checkpoints)
    branch = uuid.uuid4().hex[:12]
    branches = [*_lineage(checkpoints), (branch, step)]
    write_atomically(checkpoints / LINEAGE, (json.dumps({"format": 1, "branches": branches}) + "\n").encode())
    return branch


def _node_id(path: Path) -> str:
    """Return the id of the node whose directory this is, made by the first process that asks. Raises OSError."""
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    if not path.exists():
        made.write_text(json.dumps({"id": uuid.uuid4().hex}))
        try:
            os.link(made, path)  # fails if another process was first
        except FileExistsError:
            pass
        finally:
            made.unlink()
    return str(json.loads(path.read_text())["id"])
