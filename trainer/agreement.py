"""Agreement between processes over JAX's coordination service (TCP; no device work, usable from any thread).

An exception in one process is raised in every process, so that no process waits for one that has failed. With one process both operations
only call the work.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax

from ridgeline.configs.errors import UserError
from ridgeline.trainer.stop import in_thread

T = TypeVar("T")

_TIMEOUT_MS = 3_600_000
"""The coordination service's heartbeats detect a dead process long before this timeout."""

_created = itertools.count()


class PeerError(RuntimeError):
    """The work failed in at least one process; the message has the processes and their errors."""


class Agreement:
    """An ordered channel between all processes. Every process must create and call it in the same order, from one thread at a time."""

    def __init__(self, name: str) -> None:
        self.process, self.count = jax.process_index(), jax.process_count()
        self._prefix = f"ridge/{name}/{next(_created)}"
        self._round = 0
        self._published: list[str] = []

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` in process 0 and return its result (a JSON value) in every process."""
        if self.count == 1:
            return work()
        key = self._next_key()
        if self.process == 0:
            outcome = _attempt(work)
            self._publish(key, outcome)
        else:
            outcome = json.loads(_wait_for(key))
        _raise({"0": outcome} if "error" in outcome else {})
        return cast(T, outcome["value"])

    def each(self, work: Callable[[], T]) -> list[T]:
        """Run `work` in every process; return all results (JSON values) by process in process 0, and [] in the others."""
        if self.count == 1:
            return [work()]
        key = self._next_key()
        mine = _attempt(work)
        if self.process != 0:
            _client().key_value_set(f"{key}/{self.process}", json.dumps(mine))
            _raise(json.loads(_wait_for(key)))
            return []
        outcomes = [mine]
        for other in range(1, self.count):
            outcomes.append(json.loads(_wait_for(f"{key}/{other}")))
            _client().key_value_delete(f"{key}/{other}")
        for published in self._published:  # every process has reached this point, and so has read the earlier values
            _client().key_value_delete(published)
        self._published.clear()
        failures = {str(process): outcome for process, outcome in enumerate(outcomes) if "error" in outcome}
        self._publish(key, failures)
        _raise(failures)
        return [outcome["value"] for outcome in outcomes]

    def raise_alarm(self, name: str) -> None:
        """Signal to the other processes, which poll `alarmed(name)`, that they must not wait for this one."""
        if self.count > 1:
            _client().key_value_set(f"{self._prefix}/alarm/{name}/{self.process}", "1", allow_overwrite=True)

    def alarmed(self, name: str) -> bool:
        """Return whether a process has raised the alarm `name`."""
        if self.count == 1:
            return False
        return bool(_client().key_value_dir_get(f"{self._prefix}/alarm/{name}"))

    def _next_key(self) -> str:
        self._round += 1
        return f"{self._prefix}/{self._round}"

    def _publish(self, key: str, value: Any) -> None:
        _client().key_value_set(key, json.dumps(value))
        self._published.append(key)


def coordination_client() -> Any:
    """Return JAX's coordination client; None for a single process."""
    return _client() if jax.process_count() > 1 else None


def own_address() -> str:
    """Return this host's numeric address in the network of JAX's coordinator; no packet is sent."""
    from jax._src import distributed

    host = str(distributed.global_state.coordinator_address or "127.0.0.1:0").rpartition(":")[0].strip("[]")
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _wait_for(key: str) -> str:
    client = _client()
    return in_thread(lambda: str(client.blocking_key_value_get(key, _TIMEOUT_MS)))


def _client() -> Any:
    # The only access to JAX's coordination client (Orbax uses it too).
    from jax._src import distributed

    assert distributed.global_state.client is not None, "several processes, but jax.distributed is not initialized"
    return distributed.global_state.client


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except UserError as error:
        return {"error": str(error), "user": True}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "user": False}


def _raise(failures: Mapping[str, dict[str, Any]]) -> None:
    """Raise the error of these processes, if any."""
    for outcome in failures.values():
        if outcome["user"]:
            raise UserError(outcome["error"])
    if failures:
        raise PeerError("; ".join(f"process {process}: {outcome['error']}" for process, outcome in failures.items()))
