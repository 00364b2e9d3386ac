"""The operation of a computation that first gives NaN or infinity: a jaxpr is run operation by operation, and traced back from its result.

The trace goes from a result that is not finite to the operation that made it, and on to an input of that which is not finite, NaN first,
until all inputs are finite. An infinity that is a constant of the program (a mask, a start value of a maximum) is no origin. Loops and
calls are run as a whole, and only those on the trace step by step: of a loop over layers the iteration is the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend import core

CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"})
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the calls that are traced inside, and of the parameters that have their body; any other operation is one by itself."""
FINITE, INF, NAN = 0, 1, 2


@dataclass(frozen=True)
class Operand:
    """An input of an operation."""

    shape: tuple[int, ...]
    dtype: str
    largest: float
    """Largest magnitude; NaN where one is NaN."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of a loop on the trace."""

    index: int
    length: int


@dataclass(frozen=True)
class Origin:
    """The first operation whose result is not finite."""

    operation: str
    """Name of the JAX primitive."""
    scope: str
    """Its named scopes and transformations, as in profiles."""
    source: str
    """FILE:LINE (function)."""
    result: str
    """nan or inf."""
    operands: tuple[Operand, ...]
    loops: tuple[Iteration, ...]
    """The loops around it, outermost first."""

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return "transpose(" in self.scope


def find_origin(function: Callable[..., Any], *args: Any, result: int) -> Origin | None:
    """Return the origin of a leaf of function(*args) that is not finite, by its number; None: an argument is not finite."""
    traced, limit = jax.make_jaxpr(function)(*args), sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 100_000))  # a call of ours for each operation of the longest path
    try:
        return _Trace(traced, jax.tree.leaves(args)).origin_of_output(result).origin
    finally:
        sys.setrecursionlimit(limit)


def state_of(x: Any) -> int:
    """Return whether all elements are finite (FINITE), or the worst there is: INF or NAN."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return FINITE
    return NAN if bool(jnp.isnan(x).any()) else INF if bool(jnp.isinf(x).any()) else FINITE


@dataclass(frozen=True)
class _Found:
    """Where a value that is not finite comes from."""

    origin: Origin | None = None
    inputs: tuple[int, ...] = ()
    """Without an origin: numbers of the inputs of the jaxpr that it may come from; () for a constant of the program."""


class _Trace:
    """A jaxpr with all its values."""

    def __init__(self, closed: Any, args: Sequence[Any], scope: str = "", loops: tuple[Iteration, ...] = ()) -> None:
        """`scope` and `loops`: around it."""
        jaxpr, consts = closed.jaxpr, closed.consts
        self.jaxpr, self.scope, self.loops = jaxpr, scope, loops
        self.values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        self.producer: dict[Any, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for var, value in zip(eqn.outvars, _run(eqn, [self._read(v) for v in eqn.invars]), strict=True):
                self.values[var], self.producer[var] = value, number
        self._found: dict[Any, _Found] = {}

    def origin_of_output(self, number: int) -> _Found:
        """Trace a result that is not finite."""
        return self._origin(self.jaxpr.outvars[number])

    def _scope(self, eqn: Any) -> str:
        return "/".join(filter(None, (self.scope, str(eqn.source_info.name_stack))))

    def _read(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self.values[var]

    def _origin(self, var: Any) -> _Found:
        if isinstance(var, core.Literal) or var in self.jaxpr.constvars:
            return _Found()
        if var not in self._found:
            self._found[var] = self._trace(var)
        return self._found[var]

    def _trace(self, var: Any) -> _Found:
        if var not in self.producer:
            return _Found(inputs=(self.jaxpr.invars.index(var),))
        eqn, wanted = self.jaxpr.eqns[self.producer[var]], state_of(self.values[var])
        inner = self._inside(eqn, list(eqn.outvars).index(var))
        if inner.origin is not None:
            return inner
        bad = sorted((v for v in eqn.invars if state_of(self._read(v))), key=lambda v: -state_of(self._read(v)))
        inputs: tuple[int, ...] = ()
        for v in [*(eqn.invars[number] for number in inner.inputs), *bad]:
            found = self._origin(v)
            if found.origin is not None:
                return found
            inputs += found.inputs
        if inputs or (bad and wanted == INF):  # an infinity made of a constant is one
            return _Found(inputs=inputs)
        return _Found(self._describe(eqn, var))

    def _describe(self, eqn: Any, var: Any) -> Origin:
        operands = [jnp.asarray(self._read(v)) for v in eqn.invars]
        return Origin(
            operation=eqn.primitive.name,
            scope=self._scope(eqn),
            source=source_info_util.summarize(eqn.source_info),
            result="nan" if state_of(self.values[var]) == NAN else "inf",
            operands=tuple(Operand(x.shape, str(x.dtype), _largest(x)) for x in operands),
            loops=self.loops,
        )

    def _inside(self, eqn: Any, output: int) -> _Found:
        """Trace an output of a call or a loop inside of it; the inputs are numbers of `eqn`'s."""
        args, name = [self._read(v) for v in eqn.invars], eqn.primitive.name
        if name == "cond":
            index, *args = args
            branches = eqn.params["branches"]
            branch = branches[min(max(int(index), 0), len(branches) - 1)]
            return _shifted(_Trace(branch, args, self._scope(eqn), self.loops).origin_of_output(output), 1)
        if name == "scan":
            return self._in_scan(eqn, args, output)
        if name == "while":
            return self._in_while(eqn, args, output)
        body = next((eqn.params[key] for key in BODIES if key in eqn.params), None) if name in CALLS else None
        if body is None:
            return _Found()
        closed = body if hasattr(body, "consts") else core.ClosedJaxpr(body, ())
        return _Trace(closed, args, self._scope(eqn), self.loops).origin_of_output(output)

    def _in_scan(self, eqn: Any, args: Sequence[Any], output: int) -> _Found:
        params = eqn.params
        body, fixed, carried, length = params["jaxpr"], params["num_consts"], params["num_carry"], params["length"]
        consts, carry, xs = args[:fixed], list(args[fixed : fixed + carried]), args[fixed + carried :]
        order = list(range(length))[:: -1 if params["reverse"] else 1]
        run, inputs, last = jax.jit(core.jaxpr_as_fun(body)), [], length - 1
        for number, at in enumerate(order):
            inputs.append([*consts, *carry, *(x[at] for x in xs)])
            outputs = run(*inputs[-1])
            carry = list(outputs[:carried])
            if output >= carried and state_of(outputs[output]):
                last = number
                break
        return self._in_iterations(eqn, body, inputs, last, output, order, fixed, carried)

    def _in_while(self, eqn: Any, args: Sequence[Any], output: int) -> _Found:
        params = eqn.params
        of_condition, fixed = params["cond_nconsts"], params["body_nconsts"]
        goes_on, body = jax.jit(core.jaxpr_as_fun(params["cond_jaxpr"])), params["body_jaxpr"]
        run, consts = jax.jit(core.jaxpr_as_fun(body)), args[of_condition : of_condition + fixed]
        carry, inputs = list(args[of_condition + fixed :]), []
        while bool(goes_on(*args[:of_condition], *carry)[0]):
            inputs.append([*consts, *carry])
            carry = list(run(*inputs[-1]))
        if not inputs:
            return _Found(inputs=(of_condition + fixed + output,))
        found = self._in_iterations(eqn, body, inputs, len(inputs) - 1, output, list(range(len(inputs))), fixed, len(carry))
        return _shifted(found, of_condition)

    def _in_iterations(
        self, eqn: Any, body: Any, inputs: Sequence[Sequence[Any]], last: int, output: int, order: Sequence[int], fixed: int, carried: int
    ) -> _Found:
        """Trace an output of iteration `last` back through what each iteration hands to the next."""
        wanted, outer = {output}, list[int]()
        for number in range(last, -1, -1):
            trace = _Trace(body, inputs[number], self._scope(eqn), (*self.loops, Iteration(order[number], len(order))))
            handed = set[int]()
            for one in sorted(wanted):
                found = trace.origin_of_output(one)
                if found.origin is not None:
                    return found
                handed |= {place - fixed for place in found.inputs if fixed <= place < fixed + carried}
                outer += [place for place in found.inputs if not fixed <= place < fixed + carried]
            wanted = handed
            if not wanted:
                break
        return _Found(inputs=tuple(dict.fromkeys([*outer, *(fixed + place for place in sorted(wanted))])))


def _shifted(found: _Found, by: int) -> _Found:
    return _Found(found.origin, tuple(number + by for number in found.inputs))


def _run(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of one operation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # by JAX version
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*functions, *values, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def _largest(x: Any) -> float:
    if x.size == 0:
        return 0.0
    return float(np.asarray(jnp.max(jnp.abs(x.astype(jnp.float32)))))
