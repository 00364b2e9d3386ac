"""Slurm node lists and node addresses: from `scontrol` where it works, else from our own parser.

`scontrol` is missing in most containers. The one of Slurm 22.05 answers a list with a suffix after the brackets (`n[1-2]-ib`) with an error
on stderr, no names and exit code 0.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess

from ridgeline.configs.environment import shortened

MAX_HOSTS = 1 << 20
"""Longer lists are refused as a mistake."""

_SCONTROL_TIMEOUT_S = 10.0
_LONGEST_NUMBER = 20
_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*")


def hostnames(node_list: str) -> tuple[list[str], str]:
    """Return the hosts of a compressed node list and which parser read it: scontrol, else our own. Raises ValueError."""
    names = (_scontrol("show", "hostnames", node_list) or "").split()
    if names:
        return names, "scontrol show hostnames"
    return expand(node_list), "own parser, scontrol gave no answer"


@functools.cache
def node_address(node: str) -> str | None:
    """Return the address (or name) at which Slurm itself reaches a node; None if scontrol does not report one."""
    match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", node, "--oneliner") or "")
    return match.group(1) if match else None


def _scontrol(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def expand(text: str) -> list[str]:
    """Return the hosts of a node list such as `r[1-2]n[01-04],login,gpu[1,3-5].local`, in order.

    The last bracket of a name varies fastest. Zero padding follows the width of a range's start. Raises ValueError naming the unreadable
    part.
    """
    hosts: list[str] = []
    position, shown = 0, shortened(text)
    while position < len(text):
        pieces: list[list[str]] = []
        while position < len(text) and text[position] != ",":
            match = _PART.match(text, position)
            if match is None:
                raise ValueError(f"node list '{shown}': unmatched bracket at character {position + 1}")
            prefix, numbers, plain = match.groups()
            pieces += [[plain]] if plain is not None else [[prefix], _numbers(numbers, shown)]
            position = match.end()
        position += 1
        names = 1
        for piece in pieces:
            names *= len(piece)
        if len(hosts) + names > MAX_HOSTS:
            raise ValueError(f"node list '{shown}': more than {MAX_HOSTS} hosts")
        if pieces:
            hosts += map("".join, itertools.product(*pieces))
    return [host for host in (name.strip() for name in hosts) if host]


def _numbers(inner: str, shown: str) -> list[str]:
    """Expand the inside of one bracket: `1,03-05` is 1, 03, 04, 05."""
    found: list[str] = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"node list '{shown}': '{shortened(item)}' is neither a number nor a range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if max(len(first), len(last)) > _LONGEST_NUMBER:
            raise ValueError(f"node list '{shown}': '{shortened(item)}' has more than {_LONGEST_NUMBER} digits")
        low, high = int(first), int(last)
        if high < low:
            raise ValueError(f"node list '{shown}': the range '{shortened(item)}' is descending")
        if high - low >= MAX_HOSTS:
            raise ValueError(f"node list '{shown}': more than {MAX_HOSTS} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(low, high + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Expand a list of counts per node, such as SLURM_TASKS_PER_NODE: `2(x3),1` is 2, 2, 2, 1. Raises ValueError."""
    shown = shortened(text)
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"'{shown}' is not a list of counts such as 2(x3),1")
        tasks, times = match.group(1), match.group(2) or "1"
        if max(len(tasks), len(times)) > len(str(MAX_HOSTS)) or len(counts) + int(times) > MAX_HOSTS:
            raise ValueError(f"'{shown}': more than {MAX_HOSTS} nodes")
        counts += [int(tasks)] * int(times)
    return counts
