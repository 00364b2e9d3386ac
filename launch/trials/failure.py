"""Reason of a failed run, from its output and exit code."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular
from ridgeline.launch import exit_codes

TAIL_BYTES = 1 << 16
LONGEST = 300
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|CUDA_ERROR_OUT_OF_MEMORY|std::bad_alloc", re.I)
_OWN = re.compile(r"ridge(?: \w+)?: (?:error|stopped): (.*)")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Failure|Interrupt): .*")
_CODES = {
    exit_codes.HANG: "hang: no progress, ended by the watchdog",
    exit_codes.LOST_PEER: "another process of the run was lost",
    exit_codes.BAD_NODE: "a node failed the preflight",
    exit_codes.NUMERICAL_FAILURE: "too many non-finite steps",
    exit_codes.SAVE_FAILURE: "checkpoints could not be written",
}
SIGKILL_CODE = 137


def failure_reason(log: Path, code: int) -> str:
    """Return the reason in one line: out of memory, else ridge's last error, else the last exception, else the exit code."""
    lines = [re.sub(r"^ *\d+: ", "", line).strip() for line in _tail(log)]
    memory = next((line for line in lines if _MEMORY.search(line)), None)
    if memory is not None:
        return _short(f"out of memory: {memory}")
    own = [match[1] for line in lines if (match := _OWN.search(line))]
    if own:
        return _short(own[-1])
    raised = [line for line in lines if _EXCEPTION.match(line)]
    if raised:
        return _short(raised[-1])
    if code in _CODES:
        return _CODES[code]
    if code in (SIGKILL_CODE, -9):
        return "killed by signal 9, possibly out of host memory"
    return f"exit code {code}"


def _tail(log: Path) -> list[str]:
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except (UserError, OSError):
        return []


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
