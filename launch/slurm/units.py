"""Times and memory sizes in Slurm's notation."""

from __future__ import annotations

import re

from ridgeline.configs.environment import shortened
from ridgeline.configs.errors import UserError

TIME_FORMS = "MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_TIME = re.compile(
    r"(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(?::(?P<ms>\d+))?"
)
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
MOST_LETTERS = 40
"""Of a time or size: more digits are a mistake."""
_BYTES = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_time_s(text: str, what: str) -> int | None:
    """Return the seconds of a Slurm time; None for UNLIMITED and INFINITE. Raises UserError, naming `what`, for anything else."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None or len(text) > MOST_LETTERS:
        raise UserError(f"{what} '{shortened(text)}' is not a Slurm time ({TIME_FORMS})")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = 24 * part["days"] + part["dh"] + part["h"]
    minutes = part["dm"] + part["hm"] + part["m"]
    total_s = 3600 * hours + 60 * minutes + part["ds"] + part["hs"] + part["ms"]
    if total_s == 0:
        raise UserError(f"{what} '{text}': must be positive")
    return total_s


def format_time(seconds: int) -> str:
    """Format seconds as HH:MM:SS, from one day on as D-HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def parse_memory_bytes(text: str, what: str) -> int | None:
    """Return the bytes of a Slurm memory size (no suffix: MiB); None for 0, all memory of the node. Raises UserError."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None or len(text) > MOST_LETTERS:
        raise UserError(f"{what} '{shortened(text)}' is not a Slurm memory size (such as 480G, 500000M, or 0 for all of the node)")
    return int(match[1]) * _BYTES[match[2].upper()] or None
