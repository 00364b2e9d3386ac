"""Which XLA flags the installed jaxlib knows: an unknown one aborts the process that uses it, so another process is asked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ridgeline.configs.errors import UserError

_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS:(.*)")
_PARSES_FLAGS = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_TIMEOUT_S = 120


def split_flags(text: str) -> list[str]:
    """Split the value of XLA_FLAGS. Raises UserError for unbalanced quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"XLA_FLAGS='{text}': {error}") from None


def name_of(flag: str) -> str:
    """Return the name of a flag such as --xla_dump_to=/tmp."""
    return flag.split("=", 1)[0]


def unknown_flags(flags: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Return those of the flags that the installed jaxlib does not know (0.15 s).

    Raises UserError when it cannot read the value of one.
    """
    unknown: list[str] = []
    asked = list(flags)
    while asked:
        done = subprocess.run(
            [sys.executable, "-c", _PARSES_FLAGS],
            env={**env, "XLA_FLAGS": " ".join(asked), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            break
        found = [flag for line in _UNKNOWN.findall(done.stderr) for flag in line.split()]
        named = [flag for flag in asked if any(name_of(flag) == name_of(other) for other in found)]
        if not named:
            raise UserError(f"XLA_FLAGS: the installed jaxlib cannot read the value of one of: {' '.join(asked)}")
        unknown += named
        asked = [flag for flag in asked if flag not in named]
    return unknown
