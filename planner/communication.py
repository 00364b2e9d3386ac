"""What a collective costs: the alpha-beta model over one or several levels of links.

    cost = time_s("all-gather", bytes_full, fabric.axes_group(sizes, ("fsdp",)))
    cost.seconds, cost.algorithm, cost.bottleneck_link, cost.by_link

Notation: n bytes of the full tensor (all-to-all, point-to-point: of the tensor one device holds), p devices, a latency of a hop (s),
W bandwidth of a device in ONE direction (bytes/s).

    all-gather, reduce-scatter   ring                (p-1)*a + (p-1)/p * n/W
                                 recursive halving   log2(p)*a + (p-1)/p * n/W              p a power of two
    all-reduce                   ring                2*(p-1)*a + 2*(p-1)/p * n/W
                                 recursive halving   2*log2(p)*a + 2*(p-1)/p * n/W          p a power of two
                                 tree                2*log2(p)*(a + n/W)
                                 in-switch           2*a + n/W                              the switch adds up; every device sends n once
    all-to-all                   pairwise            (p-1)*a + (p-1)/p * n/W
    point-to-point                                   a + n/W

Over several levels (g devices per domain of the innermost, the rest outside), *hierarchical* is
    all-reduce(n) = reduce-scatter(g, n) + all-reduce(rest, n/g) + all-gather(g, n)
    all-gather(n) = all-gather(rest, n/g) + all-gather(g, n), reduce-scatter its mirror image,
    all-to-all: what stays inside a domain goes over its links, the rest over the outer ones,
one phase after the other; *pipelined* is the same with the phases overlapped chunk by chunk, as communication libraries do for large
messages: all latencies, and the transfer time of the slowest ports alone (all network levels leave through the same ones). A plain
*ring* (or tree, or recursive halving) over several levels runs at the slowest link.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005, sections
3 and 4; JAX scaling book, chapters Sharding and GPUs; DeepSeek-V3 (arXiv 2412.19437, section 3.2) for node-limited all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from configs.errors import UserError, unknown_name
from planner.links import CommGroup, Link, Span

Op = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"]
Algorithm = Literal["ring", "tree", "recursive-halving", "in-switch", "hierarchical", "pipelined"]
OPS: tuple[Op, ...] = get_args(Op)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

IN_SWITCH_FROM = 5
"""Smallest group whose all-reduce NCCL gives to the NVSwitch (measured: ml-engineering, network, section SHARP)."""


@dataclass(frozen=True, slots=True)
class Term:
    """Time spent on one link: hops and transfer."""

    link: Link
    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Predicted cost of one collective."""

    seconds: float
    algorithm: str
    """One of ALGORITHMS; `none` for a group of one."""
    algorithm_bandwidth: float
    """n / seconds, bytes/s."""
    bus_bandwidth: float
    """Algorithm bandwidth times the share of the tensor a device sends: 2(p-1)/p for all-reduce, (p-1)/p for the others, 1 for
    point-to-point (NCCL tests, PERFORMANCE.md). Comparable to the link's bandwidth for a ring on one level only."""
    bottleneck_link: str
    """Name of the link that takes longest; empty for a group of one."""
    terms: tuple[Term, ...] = ()
    """By link, innermost first. They sum to `seconds`, except when pipelined."""

    @property
    def by_link(self) -> dict[str, float]:
        """Seconds by link name."""
        return {term.link.name: term.seconds for term in self.terms}


def time_s(op: str, bytes_full: float, group: CommGroup, algorithm: str | None = None, *, phases: str = "ring") -> CollectiveCost:
    """Predict the time of a collective.

    Args:
      op: one of OPS.
      bytes_full: the full tensor: what a gather gives out, what a reduction takes in; for all-to-all and point-to-point the tensor one
        device holds.
      group: from `Fabric.group` or `Fabric.axes_group`.
      algorithm: one of ALGORITHMS; None: what a communication library would choose. That is the fastest of those it has (ring, tree,
        in-switch where the switch can, hierarchical over several levels; pipelined where the links are calibrated, because their
        curves were measured so).
      phases: with hierarchical and pipelined, the algorithm of the phases: ring, recursive-halving, or tree (of the all-reduce between
        domains; the gathers inside are rings then).

    Raises UserError: an unknown op or algorithm, bytes that are no positive number, an algorithm the op or the group does not have.
    """
    if op not in OPS:
        raise unknown_name("collective", op, OPS)
    if not (bytes_full > 0 and math.isfinite(bytes_full)):
        raise UserError(f"{op} of {bytes_full:g} bytes: a collective moves more than 0 bytes")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if group.size == 1:
        return CollectiveCost(0.0, "none", 0.0, 0.0, "")
    if algorithm is not None:
        return _cost(op, bytes_full, group, algorithm, phases)
    return min((_cost(op, bytes_full, group, name) for name in _library_choices(op, group)), key=lambda cost: cost.seconds)


def bus_factor(op: str, size: int) -> float:
    """Return what algorithm bandwidth is multiplied with to give bus bandwidth."""
    if op == "point-to-point":
        return 1.0
    return (2 if op == "all-reduce" else 1) * (size - 1) / size


def _library_choices(op: str, group: CommGroup) -> list[str]:
    if op == "point-to-point":
        return ["ring"]
    if len(group.spans) == 1:
        choices = ["ring"]
        if op == "all-reduce":
            choices.append("tree")
            if group.spans[0].link.in_switch is not None and group.size >= IN_SWITCH_FROM:
                choices.append("in-switch")
        return choices
    calibrated = all(span.link.reached is not None for span in group.spans)
    choices = ["pipelined" if calibrated else "hierarchical"]
    if op == "all-reduce":
        choices.append("tree")
    return choices


def _cost(op: str, n: float, group: CommGroup, algorithm: str, phases: str = "ring") -> CollectiveCost:
    if algorithm in ("hierarchical", "pipelined") and len(group.spans) > 1:
        terms = _merge(_hierarchical(op, n, group.spans, phases))
        longest = max(terms, key=lambda term: term.seconds)
        seconds = sum(term.seconds for term in terms)
        if algorithm == "pipelined":
            seconds = sum(term.latency_s for term in terms) + max(_transfer_by_port(terms).values())
    else:
        name = phases if algorithm in ("hierarchical", "pipelined") else algorithm
        slowest = group.slowest
        assert slowest is not None
        if name == "in-switch" and (len(group.spans) > 1 or slowest.in_switch is None):
            raise UserError("algorithm 'in-switch' needs one level whose switch can reduce (in_switch_reduction in the cluster file)")
        worst_hop = max(span.link.latency_s for span in group.spans)
        longest = _flat(op, n, group.size, slowest, worst_hop, name)
        terms, seconds, algorithm = [longest], longest.seconds, name
    algorithm_bandwidth = n / seconds
    bus = algorithm_bandwidth * bus_factor(op, group.size)
    return CollectiveCost(seconds, algorithm, algorithm_bandwidth, bus, longest.link.name, tuple(terms))


def _transfer_by_port(terms: list[Term]) -> dict[str, float]:
    """Add up what leaves a device through the same ports: all network levels share them."""
    ports: dict[str, float] = {}
    for term in terms:
        port = "network" if term.link.kind == "network" else term.link.name
        ports[port] = ports.get(port, 0.0) + term.transfer_s
    return ports


def _flat(op: str, n: float, p: int, link: Link, latency_s: float, algorithm: str) -> Term:
    """One level: the table at the top of the module."""
    if op == "point-to-point":
        return Term(link, latency_s, link.seconds(n))
    rounds = 2 if op == "all-reduce" else 1
    share = (p - 1) / p * n
    steps: dict[str, Callable[[], Term]] = {"ring": lambda: Term(link, rounds * (p - 1) * latency_s, link.seconds(rounds * share))}
    if op != "all-to-all":
        steps["recursive-halving"] = lambda: _recursive_halving(rounds, share, p, link, latency_s)
    if op == "all-reduce":
        hops = 2 * math.ceil(math.log2(p))
        steps["tree"] = lambda: Term(link, hops * latency_s, hops * link.seconds(n))
        steps["in-switch"] = lambda: Term(link, 2 * latency_s, _in_switch_s(link, n))
    if algorithm not in steps:
        raise UserError(f"{op} has no algorithm '{algorithm}' (it has: {', '.join(steps)})")
    return steps[algorithm]()


def _in_switch_s(link: Link, n: float) -> float:
    assert link.in_switch is not None
    return n / (link.bandwidth_bytes_per_s * link.in_switch.at(n))


def _recursive_halving(rounds: int, share: float, p: int, link: Link, latency_s: float) -> Term:
    if p & (p - 1):
        below = 2 ** (p.bit_length() - 1)
        raise UserError(f"recursive halving needs a power of two of devices, not {p} (nearest: {below} or {2 * below}; ring takes any)")
    return Term(link, rounds * (p.bit_length() - 1) * latency_s, link.seconds(rounds * share))


def _hierarchical(op: str, n: float, spans: tuple[Span, ...], phases: str) -> list[Term]:
    """Terms of every phase, innermost level first."""
    if op == "all-to-all":
        if phases != "ring":
            raise UserError(f"all-to-all has no algorithm '{phases}' (it has: ring)")
        return _hierarchical_all_to_all(n, spans)
    if op == "point-to-point":
        outer = spans[-1].link
        return [_flat(op, n, 2, outer, outer.latency_s, "ring")]
    inner, rest = spans[0], spans[1:]
    link, g = inner.link, inner.fan_out
    if not rest:
        return [_flat(op, n, g, link, link.latency_s, phases)]
    gather = "ring" if op == "all-reduce" and phases == "tree" else phases
    inside = [_flat("all-gather", n, g, link, link.latency_s, gather)] * (2 if op == "all-reduce" else 1)
    return inside + _hierarchical(op, n / g, rest, phases)


def _hierarchical_all_to_all(n: float, spans: tuple[Span, ...]) -> list[Term]:
    """Every device has n/p bytes for each other; each message crosses only the innermost level that joins the two."""
    size = math.prod(span.fan_out for span in spans)
    terms, inside = [], 1
    for span in spans:
        peers = inside * (span.fan_out - 1)
        terms.append(Term(span.link, peers * span.link.latency_s, span.link.seconds(peers / size * n)))
        inside *= span.fan_out
    return terms


def _merge(terms: list[Term]) -> list[Term]:
    """Add up the terms of one link (a reduce-scatter and the all-gather after it)."""
    merged: dict[str, Term] = {}
    for term in terms:
        old = merged.get(term.link.name)
        merged[term.link.name] = term if old is None else Term(term.link, old.latency_s + term.latency_s, old.transfer_s + term.transfer_s)
    return list(merged.values())
