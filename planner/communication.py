"""Time of a collective: the alpha-beta model over one or several levels of links.

    cost = time_s("all-gather", bytes_full, fabric.axes_group(sizes, ("fsdp",)))
    cost.seconds, cost.algorithm, cost.bottleneck_link, cost.by_link

Notation: n bytes of the full tensor (all-to-all, point-to-point: of one device's tensor), p devices, a latency of a hop (s),
W bandwidth of a device in ONE direction (bytes/s).

    all-gather, reduce-scatter   ring                (p-1)*a + (p-1)/p * n/W
                                 recursive halving   log2(p)*a + (p-1)/p * n/W              p a power of two
    all-reduce                   ring                2*(p-1)*a + 2*(p-1)/p * n/W
                                 recursive halving   2*log2(p)*a + 2*(p-1)/p * n/W          p a power of two
                                 tree                2*log2(p)*(a + n/W)
                                 in-switch           2*a + n/W                              the switch adds; every device sends n once
    all-to-all                   pairwise            (p-1)*a + (p-1)/p * n/W
    point-to-point                                   a + n/W

Over several levels (g devices per domain of the innermost, M domains), *hierarchical* runs its phases one after another,
    all-reduce(n) = reduce-scatter(g, n) + all-reduce(rest, n/g) + all-gather(g, n)
    all-gather(n) = all-gather(rest, n/g) + all-gather(g, n), reduce-scatter its mirror image,
    all-to-all: messages within a domain use its links, the others the outer links.
A flat *ring* (or tree, or recursive halving) over several levels runs at the bandwidth of the slowest link.

For large messages, communication libraries overlap the levels chunk by chunk. The time is that of all hops plus the transfer over the
slowest ports (the levels of the network share the ports of a device):
    *rail-ring*     g rings through all p devices, one per port: a level with q devices inside carries r*(p-1)/p * n/q, r = 2 for all-reduce
    *double-tree*   all-reduce inside the domains (a chain, or in the switch) and over two trees between them: 2*n/g outside (n/g when
                    M = 2); 2*(g-1) hops inside and 2*log2(M) outside. On one level: 2*log2(p)*a + 2*n/W (n/W when p = 2)

Sources: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005, sections
3 and 4; JAX scaling book, chapters Sharding and GPUs; double-tree: P. Sanders, J. Speck, J. L. Träff, Two-tree algorithms for full
bandwidth broadcast, reduction and scan, Parallel Computing 35, 2009, as in NCCL since 2.4; rail-ring: NCCL, src/graph/tuning.cc (hops) and
the NCCL maintainers on nccl-tests issue 160 (a ring's bus bandwidth is what goes through the ports).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.planner.links import CommGroup, Fabric, Link, Span

Op = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"]
Algorithm = Literal["ring", "tree", "recursive-halving", "in-switch", "hierarchical", "rail-ring", "double-tree"]
OPS: tuple[Op, ...] = get_args(Op)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

IN_SWITCH_FROM = 5
"""Smallest group for which NCCL computes an all-reduce in the NVSwitch (measured: ml-engineering, network, section SHARP)."""


@dataclass(frozen=True, slots=True)
class Term:
    """Time of a collective on one link: latency of the hops, and transfer."""

    link: Link
    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        """Their sum."""
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
    """Algorithm bandwidth times the fraction of the tensor that a device sends: 2(p-1)/p for all-reduce, (p-1)/p for the others, 1 for
    point-to-point (NCCL tests, PERFORMANCE.md). It is comparable to the link's bandwidth only for a ring on one level."""
    bottleneck_link: str
    """Name of the link with the longest time; empty for a group of one."""
    terms: tuple[Term, ...] = ()
    """By link, innermost first. They sum to `seconds`, except where the levels overlap (rail-ring, double-tree)."""

    @property
    def by_link(self) -> dict[str, float]:
        """Seconds by link name."""
        return {term.link.name: term.seconds for term in self.terms}


def forwarded_s(bytes_full: float, group: CommGroup, experts: int, per_token: int) -> CollectiveCost:
    """Predict the time of an all-to-all of tokens to their experts that sends a token once to each domain with any of them, whose devices
    pass it on (DeepEP, HybridEP).

    Args:
      bytes_full: one copy for each expert of a token.
      group: the devices, which share the experts evenly.
      experts: of the layer.
      per_token: experts per token, chosen evenly.
    """
    cost = time_s("all-to-all", bytes_full, group)
    if len(group.spans) < 2:
        return cost
    domains = group.size // group.spans[0].fan_out
    missed = math.prod(1 - experts / domains / (experts - chosen) for chosen in range(per_token))
    sent = domains * (1 - max(0.0, missed)) / per_token
    inner, *outer = cost.terms
    terms = (inner, *(Term(term.link, term.latency_s, sent * term.transfer_s) for term in outer))
    seconds = sum(term.seconds for term in terms)
    rate = bytes_full / seconds
    return replace(cost, seconds=seconds, algorithm_bandwidth=rate, bus_bandwidth=rate * bus_factor("all-to-all", group.size), terms=terms)


def time_s(op: str, bytes_full: float, group: CommGroup, algorithm: str | None = None, *, phases: str = "ring") -> CollectiveCost:
    """Predict the time of a collective.

    Args:
      op: one of OPS.
      bytes_full: the full tensor: output of a gather, input of a reduction; for all-to-all and point-to-point, the tensor of one device.
      group: from `Fabric.group` or `Fabric.axes_group`.
      algorithm: one of ALGORITHMS; None: the fastest that communication libraries offer: ring, in-switch where supported, over several
        levels rail-ring, between nodes double-tree.
      phases: with hierarchical, the algorithm of the phases: ring, recursive-halving, or tree (of the all-reduce between domains; the
        gathers inside are rings then).

    Raises UserError for an unknown op or algorithm, bytes that are not positive, or an algorithm that the op or the group does not support.
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


def hop_s(bytes_sent: float, group: CommGroup) -> CollectiveCost:
    """Predict the time in which every device of a group sends its bytes to the next: one of the p - 1 hops of a ring all-gather."""
    ring = time_s("all-gather", bytes_sent * group.size, group)
    hops = max(1, group.size - 1)
    terms = tuple(Term(term.link, term.latency_s / hops, term.transfer_s / hops) for term in ring.terms)
    seconds = ring.seconds / hops
    rate = bytes_sent / seconds if seconds else 0.0
    return CollectiveCost(seconds, ring.algorithm, rate, rate, ring.bottleneck_link, terms)


def mesh_bus_bandwidth(op: str, bytes_full: float, fabric: Fabric, sizes: Mapping[str, int], axes: Sequence[str]) -> float | None:
    """Predict the bus bandwidth of a collective over mesh axes, in bytes/s.

    Args:
      op: all-reduce, all-gather, reduce-scatter or all-to-all; other kinds have no prediction.
      bytes_full: see `time_s`.
      fabric: links of the cluster.
      sizes: mesh axis -> devices, all axes.
      axes: the axes it communicates over.

    Returns None without a prediction: another kind, an unknown axis, or a group of one device.
    """
    if op not in OPS or op == "point-to-point" or not axes or not set(axes) <= set(sizes):
        return None
    return time_s(op, bytes_full, fabric.axes_group(sizes, axes)).bus_bandwidth or None


def bus_factor(op: str, size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth."""
    if op == "point-to-point":
        return 1.0
    return (2 if op == "all-reduce" else 1) * (size - 1) / size


def _library_choices(op: str, group: CommGroup) -> list[str]:
    several = len(group.spans) > 1
    if op in ("point-to-point", "all-to-all"):
        return ["hierarchical" if several else "ring"]
    choices = ["rail-ring" if several else "ring"]
    if op == "all-reduce":
        if group.spans[-1].link.kind == "network":  # inside a node NCCL uses rings and the switch
            choices.append("double-tree")
        if not several and group.spans[0].link.in_switch is not None and group.size >= IN_SWITCH_FROM:
            choices.append("in-switch")
    return choices


def _cost(op: str, n: float, group: CommGroup, algorithm: str, phases: str = "ring") -> CollectiveCost:
    if algorithm == "hierarchical" and len(group.spans) > 1:
        terms = _merge(_hierarchical(op, n, group.spans, phases))
        seconds = sum(term.seconds for term in terms)
    elif algorithm in ("rail-ring", "double-tree"):
        terms = _rail_ring(op, n, group) if algorithm == "rail-ring" else _double_tree(op, n, group)
        seconds = sum(term.latency_s for term in terms) + max(term.transfer_s for term in terms)
    else:
        algorithm = phases if algorithm == "hierarchical" else algorithm
        slowest = group.slowest
        assert slowest is not None
        if algorithm == "in-switch" and (len(group.spans) > 1 or slowest.in_switch is None):
            raise UserError("algorithm 'in-switch' needs a group on one level with in_switch_reduction in the cluster file")
        worst_hop = max(span.link.latency_s for span in group.spans)
        terms = [_flat(op, n, group.size, slowest, worst_hop, algorithm)]
        seconds = terms[0].seconds
    longest = max(terms, key=lambda term: term.seconds)
    algorithm_bandwidth = n / seconds
    bus = algorithm_bandwidth * bus_factor(op, group.size)
    return CollectiveCost(seconds, algorithm, algorithm_bandwidth, bus, longest.link.name, tuple(terms))


def _rail_ring(op: str, n: float, group: CommGroup) -> list[Term]:
    """Return the terms of rings through all devices, one per port of a domain."""
    if op in ("all-to-all", "point-to-point"):
        raise UserError(f"{op} has no algorithm 'rail-ring' (it has: ring, hierarchical)")
    rounds, p, inside = (2 if op == "all-reduce" else 1), group.size, 1
    terms = []
    for span in group.spans:
        hops = rounds * (span.fan_out - 1) * (p // (inside * span.fan_out))
        terms.append(Term(span.link, hops * span.link.latency_s, span.link.seconds(rounds * (p - 1) / p * n / inside)))
        inside *= span.fan_out
    return terms


def _double_tree(op: str, n: float, group: CommGroup) -> list[Term]:
    """Return the terms of an all-reduce inside the innermost domains and over two trees between them; on one level only the trees."""
    if op != "all-reduce":
        raise UserError(f"{op} has no algorithm 'double-tree' (it has: {'ring, recursive-halving' if op != 'all-to-all' else 'ring'})")
    inner, outer = group.spans[0], group.spans[1:]
    if not outer:
        link = inner.link
        return [Term(link, 2 * math.ceil(math.log2(group.size)) * link.latency_s, link.seconds((1 if group.size == 2 else 2) * n))]
    g, domains = inner.fan_out, group.size // inner.fan_out
    link = inner.link
    in_switch = link.in_switch is not None and g >= IN_SWITCH_FROM
    chain = _in_switch_s(link, n) if in_switch else link.seconds(2 * (g - 1) / g * n)
    terms = [Term(link, 2 * (g - 1) * link.latency_s, chain)]
    share = (1 if domains == 2 else 2) * n / g  # a node inside one tree is a leaf of the other
    hops = 2 * math.ceil(math.log2(domains))
    return terms + [Term(span.link, hops * span.link.latency_s if span is outer[-1] else 0.0, span.link.seconds(share)) for span in outer]


def _flat(op: str, n: float, p: int, link: Link, latency_s: float, algorithm: str) -> Term:
    """Return the term of a collective on one level: the table in the module docstring."""
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
    """Return the terms of each phase, innermost level first."""
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
    """Return the terms of an all-to-all: n/p bytes between each two devices, over the innermost level that connects them."""
    size = math.prod(span.fan_out for span in spans)
    terms, inside = [], 1
    for span in spans:
        peers = inside * (span.fan_out - 1)
        terms.append(Term(span.link, peers * span.link.latency_s, span.link.seconds(peers / size * n)))
        inside *= span.fan_out
    return terms


def _merge(terms: list[Term]) -> list[Term]:
    """Add the terms of each link (a reduce-scatter and the all-gather after it)."""
    merged: dict[str, Term] = {}
    for term in terms:
        old = merged.get(term.link.name)
        merged[term.link.name] = term if old is None else Term(term.link, old.latency_s + term.latency_s, old.transfer_s + term.transfer_s)
    return list(merged.values())
