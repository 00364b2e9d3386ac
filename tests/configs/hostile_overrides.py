"""Drawn `KEY=VALUE` overrides: real, misspelled and impossible keys, values of every kind, several at once, over shipped configs.

`python -m tests.configs.hostile_overrides --cases 3000 --seed 1` runs a long campaign; tests/configs/test_hostile_overrides.py a sample.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from ridgeline.cli.main import MAX_LINE
from ridgeline.configs import compose
from ridgeline.configs.dump import to_commented_yaml, to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.fields import Slot, schema_keys
from ridgeline.configs.load import from_resolved, load
from tests.configs.hostile import VALUES, bomb

LIMIT_S = 10.0
"""CPU time of one load: the parser takes seconds for the longest value that is read."""
MEMORY_BYTES = 1 << 30
"""Address space that one load may add."""
PRESETS = compose.shipped_names()
SLOTS: dict[str, Slot] = dict(schema_keys())
LEAVES = sorted(key for key, slot in SLOTS.items() if slot.section is None and not {"[", "<"} & set(key))
Case = tuple[str, tuple[str, ...]]
"""A config and its overrides."""

SCALARS = st.one_of(
    st.integers(-3, 300).map(str),
    st.sampled_from(["1", "2", "4", "8", "64", "128", "1024", "0", "-1", "true", "false", "null", "1e-3", "0.5", "1e300", "-1e300"]),
    st.sampled_from([str(2**31), str(2**53), str(2**63), str(2**64), str(10**30), str(10**400), "-" + str(10**400), "1e-320"]),
    st.sampled_from([".nan", ".inf", "-.inf", "NaN", "1_0", "0x10", "0o17", "+1", "1.", "--1", "\u0661\u0662", "1e", "1 # x"]),
)
STRUCTURES = st.recursive(
    st.one_of(SCALARS, st.sampled_from(["x", "''", "corpus", "llama", "path"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(["path", "weight", "x", "0", "a.b", "''", "null"]), inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=6,
)
LONG = st.sampled_from(
    [
        "x" * 1_000_000,
        "[" + "1, " * 333_000 + "1]",
        "[" * 1_000_000,
        "- " * 500_000,
        "{a: " * 250_000,
        "'" + "a b " * 250_000,
        "#" * 1_000_000,
        "\n" * 1_000_000,
        "9" * 1_000_000,
        "&" + "a" * 1_000_000 + " 1",
        "!" * 1_000_000,
        "? " * 20_000,
        "x: " * 20_000,
        "- " * 3_000,
        bomb(9, 9),
        bomb(3, 200),
        "{" + ", ".join(f"k{number}: 1" for number in range(8_000)) + "}",
        "\n".join(f"k{number}: 1" for number in range(8_000)),
    ]
)
TEXT = st.text(st.characters(codec=None), max_size=12)
"""Control characters, null bytes and half surrogate pairs included: what is no UTF-8 on a command line arrives as those."""
# Of VALUES those that take long are drawn with LONG, rarely.
DRAWN_VALUES = st.one_of(
    SCALARS,
    STRUCTURES,
    st.sampled_from([value for value in VALUES if len(value) < 10_000]),
    TEXT,
    st.sampled_from(["=", "==1", "a=b", "!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.system", "*a", "&a {<<: *a}"]),
)


def _indexed(key: str, index: str, name: str) -> str:
    return key.replace("[]", f".{index}").replace("<name>", name)


REAL = st.builds(
    _indexed,
    st.sampled_from(sorted(SLOTS)),
    st.sampled_from(["0", "0", "0", "1", "-1", "00", "999999999999999999999", "9" * 5000, "x", "", "²", "\u0661", "0_0"]),
    st.sampled_from(["x", "a.b", "", "..", " ", "é", "x" * 3000, "0", "null", "base", "\n", "\x1b[31m", "a b"]),
)


def misspelled(key: str, place: int, letter: str, kind: str) -> str:
    """Return a key with one letter changed, added, doubled or removed in its last part."""
    head, dot, last = key.rpartition(".")
    at = place % len(last)
    cut = {"change": last[:at] + letter + last[at + 1 :], "add": last[:at] + letter + last[at:], "drop": last[:at] + last[at + 1 :]}[kind]
    return f"{head}{dot}{cut}"


TYPOS = st.builds(
    misspelled, st.sampled_from(LEAVES), st.integers(0, 40), st.sampled_from("qz_0é-"), st.sampled_from(["change", "add", "drop"])
)
KEYS = st.one_of(
    REAL,
    st.sampled_from(LEAVES),
    TYPOS,
    st.builds(lambda key, more: f"{key}.{more}", st.sampled_from(sorted(SLOTS)), TEXT),
    st.lists(st.sampled_from(["model", "data", "train", "0", "mesh", "", "rules", " ", "trainer", "steps"]), max_size=6).map(".".join),
    TEXT,
    st.sampled_from(
        ["", " ", ".", "..", "a" * 100_000, ".".join("a" * 5_000), "data.train." + "0." * 5_000, "base", "base.0", "model ", "\ufeff"]
    ),
)
OVERRIDES = st.one_of(
    st.builds("{}={}".format, st.sampled_from(LEAVES), DRAWN_VALUES),
    st.builds("{}={}".format, KEYS, DRAWN_VALUES),
    st.builds("{}{}{}".format, KEYS, st.sampled_from(["", "==", "=", " = ", "=\n", ":"]), DRAWN_VALUES),
)


@st.composite
def contradictions(draw: st.DrawFn) -> tuple[str, ...]:
    """Draw overrides of the same places: a section as a scalar and its keys, a list and its elements, a key twice."""
    key = draw(st.sampled_from(LEAVES))
    parts = key.split(".")
    places = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    drawn = draw(st.lists(st.tuples(st.sampled_from([*places, key]), st.one_of(SCALARS, STRUCTURES)), min_size=2, max_size=5))
    return tuple(f"{place}={value}" for place, value in drawn)


CASES: st.SearchStrategy[Case] = st.tuples(
    st.sampled_from(PRESETS),
    st.one_of(
        OVERRIDES.map(lambda one: (one,)),
        st.lists(OVERRIDES, min_size=1, max_size=4).map(tuple),
        contradictions(),
        st.lists(st.builds("{}={}".format, st.sampled_from(LEAVES), SCALARS), min_size=1, max_size=6).map(tuple),
    ),
)
LONG_CASES: st.SearchStrategy[Case] = st.tuples(
    st.sampled_from(PRESETS),
    st.builds(lambda key, value: (f"{key}={value}",), st.sampled_from([*LEAVES, "mesh", "data.train", "evaluation.sets"]), LONG),
)


TYPO_CASES: st.SearchStrategy[Case] = st.tuples(st.sampled_from(PRESETS), TYPOS.map(lambda key: (f"{key}=1",)))


@contextmanager
def limited(more_bytes: int) -> Iterator[None]:
    """Let this process add at most so much address space; more is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def problem(case: Case, directory: Path) -> str | None:
    """Load a config with overrides. Return what is wrong with the answer; None when nothing is. directory: for a file."""
    start_s = time.process_time()
    try:
        with limited(MEMORY_BYTES):
            found = _answer(case, directory)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {str(error)[:100]!r} at {Path(frame.filename).name}:{frame.lineno}"
    took_s = time.process_time() - start_s
    return f"took {took_s:.0f} s" if found is None and took_s > LIMIT_S else found


def _answer(case: Case, directory: Path) -> str | None:
    try:
        resolved = load(*case, environment={})
    except UserError as error:
        return badly_refused(str(error))
    file = directory / "resolved.yaml"
    file.write_text(to_yaml(resolved.config))
    if from_resolved(file) != resolved.config:
        return "the YAML of the config gives another one"
    commented = to_commented_yaml(resolved)
    file.write_text(commented)
    return None if from_resolved(file) == resolved.config else "the commented YAML of the config gives another one"


def badly_refused(message: str) -> str | None:
    """Return what is wrong with an error; None for one line, printed whole, that names an override or a line of a file."""
    if not message.isprintable():
        return "an error with control characters"
    if len(message) > MAX_LINE:
        return f"an error of {len(message)} characters"
    place = re.match(r"override '.*?'|\S+\.yaml:\d+", message)
    return None if place is not None and ": " in message[place.end() :] else "an error without a place"


def misspelling_problem(case: Case, directory: Path) -> str | None:
    """Return what is wrong with the answer to one misspelled key: it is refused by name, and with a key that exists."""
    (override,) = case[1]
    key = override.partition("=")[0]
    if key in SLOTS or len(key.rpartition(".")[2]) < 4:
        return None  # too short to resemble another
    try:
        load(*case, environment={})
    except UserError as error:
        named = re.fullmatch(rf"override '{re.escape(override)}': {re.escape(key)}: unknown key; did you mean '(.+?)'.*", str(error))
        section = key.rpartition(".")[0]
        if named is None:
            return f"does not name a near key: {error}"
        return None if {named[1], f"{section}.{named[1]}".lstrip(".")} & set(SLOTS) else f"names a key that does not exist: {error}"
    return "an unknown key is accepted"


def campaign(cases: int, seed: int, strategy: st.SearchStrategy[Case], judge: Callable[[Case, Path], str | None]) -> dict[str, Case]:
    """Return each distinct problem of drawn cases with the first case that has it."""
    found: dict[str, Case] = {}

    with tempfile.TemporaryDirectory() as directory:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def judged(case: Case) -> None:
            if (what := judge(case, Path(directory))) is not None:
                found.setdefault(what, case)

        judged()
    return found


def main() -> None:
    """Run a campaign and print each distinct problem once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, seed = arguments.cases, arguments.seed
    found = campaign(count, seed, CASES, problem)
    found |= campaign(max(1, count // 20), seed, LONG_CASES, problem)
    found |= campaign(max(1, count // 5), seed, TYPO_CASES, misspelling_problem)
    for what, (config, overrides) in found.items():
        print(f"{config} {[override[:100] for override in overrides]}\n    {what}")
    print(f"{count} lists of overrides, {len(found)} kinds of problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
