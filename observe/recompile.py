"""What is compiled while a run trains, and which argument's shape, dtype or sharding made it so.

Two sources. Programs that were compiled ahead of time (`Program`) compare their arguments with those they were compiled for, so the answer
is exact, sharding included. Of everything else that JAX compiles in the process `jax.monitoring` tells, and of its arguments
`jax_explain_cache_misses`, whose text is parsed where it has `at <argument>, now <type> and before <type>` (jax 0.10 to 0.12).

Each compilation is a `compile` phase of the event log; that of a `Program` has its parts (observe/compilation.py).
Each one during training of a program that was compiled before is also a `recompilation` event: `program`, `step`, `duration_s`, `arguments`
(list of `argument`, `before`, `after`), `source`.
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

from ridgeline.observe.compilation import compile_in_parts
from ridgeline.rundir.events import EventLog
from ridgeline.rundir.recompilation import EVENT, Change, Recompilation

EAGER = 8
_COMPILED = "/jax/core/compile/backend_compile_duration"
_WRAPPED = re.compile(r"^jit[_(]|\)$")
_MISS = "TRACING CACHE MISS"
_EXPLAINERS = ("jax._src.interpreters.partial_eval", "jax._src.pjit", "jax._src.compiler", "jax._src.compilation_cache")
Compile = Callable[[Any, str, Sequence[Any], dict[str, Any]], Any]
"""(jitted function, name of the program, arguments, record of the phase) -> what jax's `.compile()` returns."""
_CALL_SITE = re.compile(r"CACHE MISS at (\S+?:\d+)")
_FUNCTION = re.compile(r"^\s*(?:for|never seen function:\s)\s*(\S+)", re.MULTILINE)
_ARGUMENT = re.compile(
    r"^\s*\* at (?:input path )?(?P<argument>.+?), now (?P<after>.+?) and before (?P<before>.+?)(?:, so .*)?$", re.MULTILINE
)


class CompilerWatch:
    """Notices compilations of this process between `start` and `close`.

    Operations of JAX itself (an `x[:n]` outside of any jit) are compiled for each shape, a few times in any run: they count from the
    EAGER-th compilation of the same one on, and only between steps on the thread that trains: a save slices parameters of every shape.

    Args:
      events: where they are recorded.
      say: told of a recompilation in one line.
      compile: how programs are compiled, or found among those of earlier starts.
    """

    def __init__(self, events: EventLog, say: Callable[[str], None] = lambda _: None, compile: Compile = compile_in_parts) -> None:
        self.events, self._say, self.compile = events, say, compile
        self.step: int | None = None
        """The step under way; set by the loop."""
        self._compiled, self._own = Counter[str](), set[str]()
        self._local = threading.local()
        self._filter = _Explanations(self._explain)
        self._thread = self._depth = 0
        self._was_explaining = False
        self._running = False

    def start(self) -> None:
        """Begin to listen."""
        import jax

        self._running = True
        self._thread, self._depth = threading.get_ident(), self.events.depth
        self._was_explaining = bool(getattr(jax.config, "jax_explain_cache_misses"))  # noqa: B009 (jax defines it at run time)
        jax.config.update("jax_explain_cache_misses", True)
        for name in _EXPLAINERS:
            logging.getLogger(name).addFilter(self._filter)
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if not self._running:
            return
        import jax

        self._running = False
        jax.monitoring.unregister_event_duration_listener(self._heard)
        for name in _EXPLAINERS:
            logging.getLogger(name).removeFilter(self._filter)
        jax.config.update("jax_explain_cache_misses", self._was_explaining)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Let the compilations of a block on this thread pass: whoever compiles there records it."""
        self._local.quiet = True
        try:
            yield
        finally:
            self._local.quiet = False

    def _explain(self, text: str) -> None:
        """Keep what JAX says about a function that is about to be compiled on this thread."""
        if function := _FUNCTION.search(text):
            site = _CALL_SITE.search(text)
            changes = [Change(m["argument"].strip(), m["before"], m["after"]) for m in _ARGUMENT.finditer(text)]
            explained = self._local.__dict__.setdefault("explained", {})
            explained[function[1].rpartition(".")[2]] = (changes, None if site is None else site[1])

    def _heard(self, event: str, duration_secs: float, **details: Any) -> None:
        if event != _COMPILED:
            return
        explained = self._local.__dict__.get("explained", {})
        program = _WRAPPED.sub("", str(details.get("fun_name", "?")))
        changes, source = explained.get(program, ((), None))
        known = program in explained
        explained.clear()  # what a nested function was traced for is compiled with the outer one
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
        self._say(Recompilation(program, self.step, duration_s, tuple(changes), source).describe())

    def program(self, function: Any, name: str, *abstract: Any) -> Program:
        """Compile a jitted function for these arguments, or at its first call without any; later changes are compiled and recorded."""
        made = Program(self, function, name)
        if abstract:
            made.compile(abstract)
        return made


class Program:
    """A jitted function, compiled ahead of time; arguments of another shape, dtype or sharding are compiled for when they come."""

    def __init__(self, watch: CompilerWatch, function: Any, name: str) -> None:
        self._watch, self._function, self._name = watch, function, name
        self._described: list[tuple[str, str]] = []
        self._known: dict[tuple[tuple[str, str], ...], Any] = {}
        self.compiled: Any = None
        """What jax's `.lower(...).compile()` returned last."""
        self.parts: dict[str, Any] = {}
        """Where it came from, and seconds by part (observe.compilation)."""

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
        except (TypeError, ValueError):  # how a compiled program refuses arguments it was not compiled for, before it touches them
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
        """Return the optimised HLO of the newest compilation."""
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
    """A partition in its shortest form: no trailing dimensions that are not divided, no tuples of one axis."""
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
    """Takes JAX's explanations of cache misses out of the log: they are heard here."""

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
