"""Compressed node lists, read by our own parser (against scontrol itself: tests/slurm/test_detection.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.launch.cluster.slurm_nodes import expand, expand_counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", ["node01"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[1-3,7,09-11]", ["n1", "n2", "n3", "n7", "n09", "n10", "n11"]),
        ("node[001]", ["node001"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("gpu[01-02].cluster.local", ["gpu01.cluster.local", "gpu02.cluster.local"]),
        ("n[1-2]-ib,login", ["n1-ib", "n2-ib", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("a[1-2]b[3-4]c", ["a1b3c", "a1b4c", "a2b3c", "a2b4c"]),
        ("n1,,n2", ["n1", "n2"]),
        ("", []),
    ],
)
def test_a_node_list_stands_for_its_hosts(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n]1", "n[3-1]", "n[]", "n[a-b]", "n[1[2]]", "n[1-99999999999]", "n[1-2000]m[1-2000]"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand(text)


NAME = st.text("abcxyz", min_size=1, max_size=4)


@given(
    prefix=NAME, suffix=st.sampled_from(["", "-ib", ".local"]), low=st.integers(0, 2000), count=st.integers(1, 30), width=st.integers(1, 5)
)
def test_a_range_keeps_the_width_of_its_start(prefix: str, suffix: str, low: int, count: int, width: int) -> None:
    first, last = f"{low:0{width}d}", f"{low + count - 1:0{width}d}"
    hosts = expand(f"{prefix}[{first}-{last}]{suffix}")
    assert len(set(hosts)) == count
    assert [int(host.removeprefix(prefix).removesuffix(suffix)) for host in hosts] == list(range(low, low + count))
    assert all(len(host) >= len(prefix) + len(first) + len(suffix) for host in hosts)
    assert hosts[0] == f"{prefix}{first}{suffix}"


def test_counts_per_node_are_read() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="counts"):
        expand_counts("2(3)")
