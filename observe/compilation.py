"""Compile programs with each part timed, and record compilations during training with the argument that caused them.

There are two sources. A `Program` was compiled ahead of time and compares its arguments with those it was compiled for, so the cause is
exact, sharding included. All other compilations of the process are reported by `jax.monitoring`, and their causes by the log messages of
`jax_explain_cache_misses`, which are parsed: `at <argument>, now <type> and before <type>` (jax 0.10 to 0.12).

Each compilation is a `compile` phase of the event log, so the run ledger accounts for it; that of a `Program` records its parts. Each
compilation during training of a program that was compiled before is also a `recompilation` event: `program`, `step`, `duration_s`,
`arguments` (list of `argument`, `before`, `after`), `source`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ridgeline.rundir.events import COMPILED, JAX_CACHE, EventLog
from ridgeline.rundir.recompilation import EVENT, Change, Recompilation

EAGER = 8
"""Number of compilations of one operation outside of jit from which on they are recorded."""
Compile = Callable[[Any, str, Sequence[Any], dict[str, Any]], Any]
"""(jitted function, name of the program, arguments, record of the phase) -> what jax's `.compile()` returns."""
_CACHE_HIT = "/jax/compilation_cache/cache_retrieval_time_sec"
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_WRAPPED = re.compile(r"^jit[_(]|\)$")
_MISS = "TRACING CACHE MISS"
_EXPLAINERS = ("jax._src.interpreters.partial_eval", "jax._src.pjit", "jax._src.compiler", "jax._src.compilation_cache")
_CALL_SITE = re.compile(r"CACHE MISS at (\S+?:\d+)")
_FUNCTION = re.compile(r"^\s*(?:for|never seen function:\s)\s*(\S+)", re.MULTILINE)
_ARGUMENT = re.compile(
    r"^\s*\* at (?:input path )?(?P<argument>.+?), now (?P<after>.+?) and before (?P<before>.+?)(?:, so .*)?$", re.MULTILINE
)


def compile_in_parts(function: Any, name: str, args: Sequence[Any], record: dict[str, Any]) -> Any:
    """Compile a jitted function: trace, lower, then compile by XLA or read from JAX's persistent cache.

    Args:
      function: jitted.
      name: not used; programs found among those of earlier starts are looked up by it (trainer/program_cache.py).
      args: arrays, or their shapes.
      record: receives `source` (rundir.events: COMPILED or JAX_CACHE), `trace_s`, `lower_s` and `compile_s`.
    """
    import jax

    thread, heard = threading.get_ident(), set[str]()

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        if threading.get_ident() == thread:
            heard.add(event)

    began_s = time.perf_counter()
    traced = function.trace(*args)
    traced_s = time.perf_counter()
    lowered = traced.lower()
    lowered_s = time.perf_counter()
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        compiled = lowered.compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
    # Where XLA was not called, JAX still has the program in memory: it may have come from the cache, as that of a run that went back.
    record["source"] = COMPILED if _BACKEND_COMPILE in heard and _CACHE_HIT not in heard else JAX_CACHE
    record.update(trace_s=traced_s - began_s, lower_s=lowered_s - traced_s, compile_s=time.perf_counter() - lowered_s)
    return compiled


class CompilerWatch:
    """Records compilations of this process between `start` and `close`.

    Operations outside of any jit (an `x[:n]`) are compiled for each shape, a few times in any run. They are recorded from the EAGER-th
    compilation of the same operation on, and only between steps on the training thread: a save slices parameters of every shape.

    Args:
      events: where they are recorded.
      log: receives a line for each recompilation.
      compile: compiles programs, or finds them among those of earlier starts.
    """

    def __init__(self, events: EventLog, log: Callable[[str], None] = lambda _: None, compile: Compile = compile_in_parts) -> None:
        self.events, self._log, self.compile = events, log, compile
        self.step: int | None = None
        """The current step; set by the loop."""
        self._compiled, self._own = Counter[str](), set[str]()
        self._local = threading.local()
        self._filter = _Explanations(self._explain)
        self._thread = self._depth = 0
        self._was_explaining = False
        self._running = False

    def start(self) -> None:
        """Begin to record."""
        import jax

        self._running = True
        self._thread, self._depth = threading.get_ident(), self.events.depth
        self._was_explaining = bool(getattr(jax.config, "jax_explain_cache_misses"))  # noqa: B009 (jax defines it at run time)
        jax.config.update("jax_explain_cache_misses", True)
        for name in _EXPLAINERS:
            logging.getLogger(name).addFilter(self._filter)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def close(self) -> None:
        """Stop recording. Safe to call twice."""
        if not self._running:
            return
        import jax

        self._running = False
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        for name in _EXPLAINERS:
            logging.getLogger(name).removeFilter(self._filter)
        jax.config.update("jax_explain_cache_misses", self._was_explaining)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Ignore the compilations of a block on this thread: its caller records them."""
        self._local.quiet = True
        try:
            yield
        finally:
            self._local.quiet = False

    def _explain(self, text: str) -> None:
        """Keep JAX's explanation of a function that is about to be compiled on this thread."""
        if function := _FUNCTION.search(text):
            site = _CALL_SITE.search(text)
            changes = [Change(m["argument"].strip(), m["before"], m["after"]) for m in _ARGUMENT.finditer(text)]
            explained = self._local.__dict__.setdefault("explained", {})
            explained[function[1].rpartition(".")[2]] = (changes, None if site is None else site[1])

    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        if event != _BACKEND_COMPILE:
            return
        explained = self._local.__dict__.get("explained", {})
        program = _WRAPPED.sub("", str(details.get("fun_name", "?")))
        changes, source = explained.get(program, ((), None))
        known = program in explained
        explained.clear()  # nested functions that were traced are compiled with the outer one
        if getattr(self._local, "quiet", False):
            return
        if known:
            self._own.add(program)
        if program not in self._own and (threading.get_ident() != self._thread or self.events.depth > self._depth + 1):
            return
        self._compiled[program] += 1
        if program not in self._own and self._compiled[program] < EAGER:
            return
        self.events.total("compile", duration_secs, program=program)
        if self._compiled[program] > 1 or changes:
            self.record(program, duration_secs, changes, source)

    def record(self, program: str, duration_s: float, changes: Sequence[Change], source: str | None = None) -> None:
        """Record that a program was compiled again."""
        arguments = [asdict(change) for change in changes]
        self.events.emit(EVENT, program=program, step=self.step, duration_s=duration_s, arguments=arguments, source=source)
        self._log(Recompilation(program, self.step, duration_s, tuple(changes), source).describe())

    def program(self, function: Any, name: str, *abstract: Any) -> Program:
        """Compile a jitted function for these arguments, or at its first call without any; later changes are compiled and recorded."""
        made = Program(self, function, name)
        if abstract:
            made.compile(abstract)
        return made


class Program:
    """A jitted function, compiled ahead of time. It is compiled again when it is called with another shape, dtype or sharding."""

    def __init__(self, watch: CompilerWatch, function: Any, name: str) -> None:
        self._watch, self._function, self._name = watch, function, name
        self._described: list[tuple[str, str]] = []
        self._known: dict[tuple[tuple[str, str], ...], Any] = {}
        self.compiled: Any = None
        """The last result of jax's `.lower(...).compile()`."""
        self.parts: dict[str, Any] = {}
        """`source`, and the seconds of each part (`compile_in_parts`)."""

    def compile(self, args: Sequence[Any]) -> None:
        """Compile for these arguments (arrays or their shapes)."""
        with self._watch.quiet(), self._watch.events.phase("compile", program=self._name) as self.parts:
            self.compiled = self._watch.compile(self._function, self._name, args, self.parts)
        self._described = describe(self._function, args)
        self._known[tuple(self._described)] = self.compiled

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if self.compiled is None:
            self.compile(args)
        try:
            return self.compiled(*args)
        except (TypeError, ValueError):  # raised for arguments it was not compiled for, before it donates any
            changes = compare(self._described, now := describe(self._function, args))
            if not changes:
                raise
        if tuple(now) in self._known:
            self._described, self.compiled = now, self._known[tuple(now)]
        else:
            start_s = time.monotonic()
            self.compile(args)
            self._watch.record(self._name, time.monotonic() - start_s, changes)
        return self.compiled(*args)

    def as_text(self) -> str:
        """Return the optimized HLO of the newest compilation."""
        return str(self.compiled.as_text())


def describe(function: Any, args: Sequence[Any]) -> list[tuple[str, str]]:
    """Return (path, `dtype[shape]` and sharding) of every array in the arguments of a function."""
    import inspect

    import jax

    names = list(inspect.signature(function).parameters)
    found = []
    for position, argument in enumerate(args):
        name = names[position] if position < len(names) else f"argument {position}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            found.append((name + jax.tree_util.keystr(path), _type(leaf)))
    return found


def _type(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf).__name__)
    weak = " weak" if getattr(leaf, "weak_type", False) else ""
    sharding = getattr(leaf, "sharding", None)
    spec = getattr(sharding, "spec", None)
    where = "" if sharding is None else f" {tuple(_trimmed(spec))}" if spec is not None else f" {type(sharding).__name__}"
    return f"{dtype}[{','.join(map(str, shape))}]{weak}{where}"


def _trimmed(spec: Any) -> list[Any]:
    """Return a partition spec in its shortest form: no trailing replicated dimensions, no tuples of one axis."""
    parts = [part[0] if isinstance(part, tuple) and len(part) == 1 else part for part in spec]
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return parts


def compare(before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]) -> list[Change]:
    """Return the arguments that differ; one that is only on one side is `absent` on the other."""
    old, new = dict(before), dict(after)
    return [
        Change(path, old.get(path, "absent"), new.get(path, "absent"))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


class _Explanations(logging.Filter):
    """Takes JAX's explanations of cache misses out of the log and passes them on."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "CACHE MISS" not in text:
            return True
        if _MISS in text:
            self._take(text)
        return False
