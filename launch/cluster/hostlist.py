"""Slurm's compressed node lists, read without Slurm: `r[1-2]n[01-04],login,gpu[1,3-5].local`.

`scontrol show hostnames` is asked first where it exists (launch/cluster/scontrol.py), but it is missing in most containers, and the one of
Slurm 22.05 answers a list with a suffix after the brackets (`n[1-2]-ib`) with an error on stderr, no names and exit code 0.
"""

from __future__ import annotations

import itertools
import re

MAX_HOSTS = 1 << 20
"""Longer lists are taken for a mistake."""

_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*")


def expand(text: str) -> list[str]:
    """Return the hosts of a node list in order: the last bracket of a name varies fastest, the width of a range's start is kept by padding.

    Raises ValueError naming what cannot be read.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        pieces: list[list[str]] = []
        while position < len(text) and text[position] != ",":
            match = _PART.match(text, position)
            if match is None:
                raise ValueError(f"node list '{text}': unmatched bracket at character {position + 1}")
            prefix, numbers, plain = match.groups()
            pieces += [[plain]] if plain is not None else [[prefix], _numbers(numbers, text)]
            position = match.end()
        position += 1
        names = 1
        for piece in pieces:
            names *= len(piece)
        if len(hosts) + names > MAX_HOSTS:
            raise ValueError(f"node list '{text}': more than {MAX_HOSTS} hosts")
        if pieces:
            hosts += map("".join, itertools.product(*pieces))
    return [host for host in (name.strip() for name in hosts) if host]


def _numbers(inner: str, text: str) -> list[str]:
    """Return what the inside of one bracket stands for: `1,03-05` is 1, 03, 04, 05."""
    found: list[str] = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"node list '{text}': '{item}' is neither a number nor a range")
        first, last = match.group(1), match.group(2) or match.group(1)
        low, high = int(first), int(last)
        if high < low:
            raise ValueError(f"node list '{text}': the range '{item}' runs backwards")
        if high - low >= MAX_HOSTS:
            raise ValueError(f"node list '{text}': more than {MAX_HOSTS} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(low, high + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a per-node list such as Slurm's tasks per node: `2(x3),1` is 2, 2, 2, 1. Raises ValueError."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"'{text}' is no list of counts such as 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
