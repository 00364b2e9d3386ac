"""What `scontrol` knows of nodes, where it exists: most containers have none."""

from __future__ import annotations

import functools
import re
import subprocess

from ridgeline.launch.cluster import hostlist

_TIMEOUT_S = 10.0


def hostnames(node_list: str) -> tuple[list[str], str]:
    """Return the hosts of a compressed node list and which program said so: scontrol, else our own parser. Raises ValueError."""
    answer = (_ask("show", "hostnames", node_list) or "").split()
    if answer:
        return answer, "scontrol show hostnames"
    return hostlist.expand(node_list), "own parser, scontrol gave no answer"


@functools.cache
def node_address(node: str) -> str | None:
    """Return the address (or name) at which Slurm itself reaches a node, None where scontrol cannot say."""
    match = re.search(r"\bNodeAddr=(\S+)", _ask("show", "node", node, "--oneliner") or "")
    return match.group(1) if match else None


def _ask(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
