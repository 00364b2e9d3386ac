"""Classify operations: compute, communication, memory copy, or no work of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ridgeline.explain.trace.program import Programs, guessed_opcode, is_collective, is_container
from ridgeline.explain.trace.read import Host, Kind, Ops, ProgramKey
from ridgeline.explain.trace.wire import MISSING

COMPUTE, COMMUNICATION, COPY, NOTHING = 0, 1, 2, 3

_NCCL = re.compile(r"(nccl|rccl|nvshmem|ncclx)", re.I)
_PEER = re.compile(r"Memcpy(P2P|PtoP)|memcpy.*peer|kind_src:device kind_dst:peer", re.I)
_MEMORY = re.compile(r"(hip|cu|cuda)?(Memcpy|Memset)|Copy(Device|Host)To(Device|Host)|FillBuffer|__amd_rocclr_(copy|fill)Buffer", re.I)
_OVERHEAD = re.compile(r"(CUPTI|Overhead|Synchroniz|hip\w*Synchronize|cu\w*Synchronize)", re.I)


def kinds(ops: Ops, host: Host, programs: Programs) -> np.ndarray:
    """Return the kind of every operation: int8 [n], one of COMPUTE, COMMUNICATION, COPY, NOTHING."""
    strings = host.strings

    def text(index: int) -> str:
        return "" if index == MISSING else strings[index]

    def one(name: int, op: int, module: int, program: int, details: int) -> int:
        return kind_of(text(name), text(op), _opcode(programs, host.program_key(module, program), text(op)), text(details), host.kind)

    return by_distinct(one, ops.name, ops.op, ops.module, ops.program, _kinds_of_details(ops, host)).astype(np.int8)


def kind_of(name: str, op: str, opcode: str, details: str, kind: Kind) -> int:
    """Classify one operation.

    Communication: a kernel of NCCL, RCCL or NVSHMEM; an HLO collective, send or receive; a copy to a peer device. Copies: memory copies and
    fills by the driver; on the CPU backend the HLO instruction `copy`.

    Args:
      name: of the event.
      op: the HLO instruction, '' when unknown.
      opcode: its opcode, or a guess from its name.
      details: statistic `memcpy_details` or `memset_details`, '' when there is none.
      kind: of device.
    """
    if _NCCL.match(name) or (op and is_collective(opcode)) or _PEER.search(f"{name} {details}"):
        return COMMUNICATION
    if kind == "gpu":
        if details or _MEMORY.match(name):
            return COPY
        return NOTHING if not op and _OVERHEAD.match(name) else COMPUTE
    if is_container(opcode):
        return NOTHING
    return COPY if re.match(r"copy(-start|-done)?$", opcode) else COMPUTE


def by_distinct(function: Callable[..., int], *columns: np.ndarray) -> np.ndarray:
    """Apply a function to every row of columns of small integers, once per distinct row: int64 [n]."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        distinct, index = np.unique(column, return_inverse=True)
        key = key * len(distinct) + index
        _, key = np.unique(key, return_inverse=True)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    values = np.array([function(*(int(column[row]) for column in columns)) for row in first], np.int64)
    return values[inverse]


def _opcode(programs: Programs, key: ProgramKey, op: str) -> str:
    program = programs.find(key)
    return (program.opcodes.get(op) if program is not None else None) or guessed_opcode(op)


def _kinds_of_details(ops: Ops, host: Host) -> np.ndarray:
    """Map details, which contain sizes and rarely repeat, to one of two values: a copy to a peer, or not."""
    present = np.unique(ops.details)
    peer = next((int(d) for d in present if d != MISSING and _PEER.search(host.strings[d])), MISSING)
    plain = next((int(d) for d in present if d != MISSING and not _PEER.search(host.strings[d])), MISSING)
    is_peer = np.isin(ops.details, [d for d in present if d != MISSING and _PEER.search(host.strings[d])])
    return np.where(ops.details == MISSING, MISSING, np.where(is_peer, peer, plain))
