"""XLA_FLAGS as XLA reads it, and which flags the installed jaxlib supports. Imports little: `ridge` checks the variable at each start."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.files import cache_directory

_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS:(.*)")
_FLAG = re.compile(r"""(-[\w-]*=)(?:('[^']*')|("(?:[^"\\]|\\.)*"))|([^ \t\r\n]+)""", re.A | re.S)
"""A flag with a value in quotes (name and `=`, value in single or double quotes), or any other word."""
_PARSES_FLAGS = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_FLAGS_TIMEOUT_S = 120
_VIRTUAL_DEVICES = re.compile(r"\s*(?:--xla_force_host_platform_device_count=\d{1,4}\s*)*", re.A)
"""A value that needs no look at jaxlib: nothing, or the flag of virtual CPU devices."""


def check_supported(text: str, unknown_too: bool = True) -> None:
    """Raise UserError for a value of XLA_FLAGS that would abort a process of the installed jaxlib.

    unknown_too: also for unknown flags; false: for invalid values and files that cannot be read.
    """
    if _VIRTUAL_DEVICES.fullmatch(text):
        return
    unknown = unknown_flags(split_flags(text))
    if unknown and unknown_too:
        close = nearest(name_of(unknown[0]), _names())
        raise UserError(f"XLA_FLAGS: the installed jaxlib does not support {unknown[0]}" + (f"; did you mean {close}?" if close else ""))


def _names() -> list[str]:
    """Return the names of the flags that the installed jaxlib supports: it lists them when a value is invalid."""
    return re.findall(r"^\t(--[\w-]+)=", _parse(["--xla_force_host_platform_device_count=none"], os.environ).stderr, re.M)


def split_flags(text: str) -> list[str]:
    """Split the value of XLA_FLAGS, without quotes, as XLA does (xla/parse_flags_from_env.cc). Raises UserError for unbalanced quotes.

    Quotes count only around a whole value; inside double quotes a backslash takes the next character as it is.
    """
    found = []
    for name, single, double, word in _FLAG.findall(text):
        if name:
            found.append(name + (re.sub(r"\\(.)", r"\1", double[1:-1], flags=re.S) if double else single[1:-1]))
        elif re.match(r"-[\w-]*=['\"]", word, re.A):
            raise UserError(f"XLA_FLAGS='{text}': no closing quotation mark behind {name_of(word)}=")
        else:
            found.append(word)
    return found


def name_of(flag: str) -> str:
    """Return the name of a flag such as --xla_dump_to=/tmp."""
    return flag.split("=", 1)[0]


def unknown_flags(flags: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the flags that the installed jaxlib does not support. Raises UserError for an invalid value.

    An unknown flag aborts the process that uses it, so another process tests them (0.15 s). Flags that all are supported are remembered in
    $RIDGE_CACHE (default: `ridgeline` in the user's cache directory), as long as the installed jaxlib is the same.
    """
    unknown: list[str] = []
    left = list(flags)
    remembered = _supported_file(left, env)
    if remembered is not None and os.path.exists(remembered):
        return []
    while left:
        done = _parse(left, env)
        if done.returncode == 0:
            break
        found = [flag for line in _UNKNOWN.findall(done.stderr) for flag in line.split()]
        named = [flag for flag in left if any(name_of(flag) == name_of(other) for other in found)]
        if not named and not left[0].startswith("-"):
            raise UserError(f"XLA_FLAGS: {left[0]} does not begin with --, so that XLA takes it for a file of flags, which cannot be read")
        if not named:
            raise UserError(f"XLA_FLAGS: the installed jaxlib rejects a value among: {' '.join(left)}")
        unknown += named
        left = [flag for flag in left if flag not in named]
    if remembered is not None and not unknown:
        with contextlib.suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.touch()
    return unknown


def _parse(flags: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Have another process of the installed jaxlib read these flags."""
    return subprocess.run(
        [sys.executable, "-c", _PARSES_FLAGS],
        env={**env, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=_FLAGS_TIMEOUT_S,
        check=False,
    )


def _supported_file(flags: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """Return the empty file that says that this installed jaxlib supports all these flags; None: a file may hold flags, or no jaxlib."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None or not all(flag.startswith("--") for flag in flags):
        return None
    installed = os.stat(jaxlib.origin)
    key = [importlib.metadata.version("jaxlib"), jaxlib.origin, str(installed.st_ino), str(installed.st_mtime_ns), *flags]
    return cache_directory(env) / "xla_flags" / hashlib.sha256("\0".join(key).encode(errors="surrogateescape")).hexdigest()[:32]
