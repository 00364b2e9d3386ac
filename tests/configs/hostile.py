"""Mutated config files: what a hostile or broken YAML file can contain.

`python -m tests.configs.hostile --cases 2000 --seed 1` runs a long campaign; tests/configs/test_hostile.py runs a sample.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.cli.damaged import MEMORY_BYTES, guarded

SEED = """\
base: [models/llama-3.2-1b]
name: run
run_dir: runs/a
model: {num_layers: 2, family: llama}
data:
  train:
    - path: corpus
      weight: 1.5
  seq_len: 128
  batch_size: 8
optimizer:
  learning_rate: 3e-4
  kind: adamw
evaluation:
  sets: {held: other}
trainer: {steps: 100}
mesh: {fsdp: 2}
"""
VALUES = (
    *("", "~", "[]", "{}", "-1", "0", ".nan", ".inf", "-.inf", "1e999", "9" * 5000, "1" * 400, "0x" + "f" * 300, "0o7", "0b1", "1_000"),
    *("!!int x", "!!int ''", "!!float ''", "!!float x", "!!bool x", "!!bool ''", "!!null x", "!!binary x", "!!timestamp 2020-99-99"),
    *("!!python/object:os.system x", "!!set {a}", "!!omap [a: 1]", "!!map x", "!!seq {}", "!!str [a]", "!<tag:x> y", "!x!y z", "!", "!!"),
    *("2020-01-01", "2020-13-45T99:99:99Z", "12:30:45", "'a\0b'", '"\\0"', '"\\ud800"', '"\\U00110000"', '"\\x"', "&a [*a]", "*nowhere"),
    *("&a x", "<<: {a: 1}", "? [a]\n: b", "|\n  x", ">-\n  x", "'", '"', "[", "{", "]", "@x", "`x", "%x", "x" * 100_000, "\t", "\ufeff"),
    *(
        "${env:HOME}",
        "${env:NOPE}",
        "${env:}",
        "${",
        "${x}",
        "yes",
        "No",
        "null",
        "a: b: c",
        "- -",
        "--- x",
        "...",
        "\x85",
        "\u2028",
        "\x1b[31m",
    ),
    *("[" * 3000, "{a: " * 3000, "- " * 3000, "[" * 50_000 + "]" * 50_000, "{? " * 2000, "a\n", "[" + "1, " * 30_000 + "1]"),
)


def bomb(levels: int, width: int) -> str:
    """Aliases that expand to width ** levels values."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


WHOLE = {
    "alias bomb": bomb(9, 9) + SEED,
    "wide alias bomb": bomb(3, 300),
    "mapping bomb": "\n".join(
        ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}" for n in range(1, 9)]
    ),
    "merge key": "model: &m {num_layers: 2}\nmesh:\n  <<: *m\n",
    "deep flow": "model: " + "[" * 100_000,
    "deep closed flow": "model: " + "[" * 20_000 + "]" * 20_000,
    "deep blocks": "".join(f"{' ' * n}a:\n" for n in range(600)),
    "many keys": "".join(f"key{n}: 1\n" for n in range(15_000)),
    "many keys of a section": "model:\n" + "".join(f"  key{n}: 1\n" for n in range(12_000)),
    "many documents": "---\na: 1\n" * 5000,
    "long key": "k" * 200_000 + ": 1\n",
    "long line": "name: " + "x" * 200_000 + "\n",
    "long comment": "#" * 200_000 + "\n",
    "too large": "# comment\n" * 500_000,
    "endless quotes": 'name: "' + "\\x41" * 50_000,
    "question marks": "? " * 20_000,
    "directive": "%YAML 9.9\n---\na: 1\n",
    "broken directive": "%YAML x\n---\na: 1\n",
    "tag directive": "%TAG ! tag:x,2000:\n---\n!y z\n",
    "utf-16": SEED.encode("utf-16").decode("latin-1"),
    "base is itself": "base: [./config.yaml]\n",
    "many bases": "base: [" + ", ".join(["models/gpt2"] * 5000) + "]\n",
    "base of types": "base: [1, {a: b}, [c]]\n",
    "base outside": "base: [/dev/zero, /proc/self/mem]\n",
    "base long": f"base: [{'x' * 100_000}]\n",
    "base null byte": 'base: ["a\\0b"]\n',
    "base surrogate": 'base: ["\\ud800"]\n',
}


def mutated(source: random.Random) -> tuple[str, bytes]:
    """Return a name and the bytes of a mutated config."""
    lines = SEED.splitlines()
    kind = source.choice(["value", "value", "value", "value", "line", "character", "bytes", "whole"])
    if kind == "whole":
        name = source.choice(sorted(WHOLE))
        return name, WHOLE[name].encode(errors="surrogatepass")
    if kind == "value":
        number = source.randrange(len(lines))
        key, colon, _ = lines[number].partition(":")
        value = source.choice(VALUES)
        lines[number] = f"{key}{colon or ':'} {value}"
        return f"{key.strip()} = {value[:30]!r}", "\n".join(lines).encode(errors="surrogatepass")
    if kind == "line":
        one, other = source.randrange(len(lines)), source.randrange(len(lines))
        lines.insert(one, source.choice(["", " ", "  ", "    "]) + lines[other])
        return "a line twice", "\n".join(lines).encode()
    data = bytearray(SEED.encode())
    for _ in range(source.randint(1, 6)):
        place = source.randrange(len(data))
        if kind == "bytes":
            data[place] = source.randrange(256)
        else:
            data[place : place + source.randint(0, 2)] = source.choice("[]{}:,-&*!|>'\"%@`#? \n\t0").encode()
    return f"{kind}: {bytes(data[:20])!r}", bytes(data)


def problem(directory: Path, content: bytes) -> str | None:
    """Show the config with this content. Return what is wrong with the answer; None when nothing is."""
    file = directory / "config.yaml"
    file.write_bytes(content)
    start_s = time.process_time()
    code, errors, raised = guarded(["config", "show", str(file)])
    took_s = time.process_time() - start_s
    if raised is not None:
        return raised
    if took_s > 15:
        return f"took {took_s:.0f} s"
    lines = errors.strip().splitlines()
    if code == 2 and not lines[0].startswith("ridge: error: "):
        return f"not an error line: {lines[0]}"
    if code == 2 and max(map(len, lines)) > 2200:
        return f"a line of {max(map(len, lines))} characters"
    if code == 2 and len(lines) > 1:
        return f"{len(lines)} lines"
    if code == 2 and "config.yaml" not in lines[0]:
        return f"does not name the file: {lines[0][:300]}"
    return None if code in (0, 2) else f"exit code {code}"


def main() -> None:
    """Run a campaign and print each distinct problem once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, found = random.Random(arguments.seed), Counter[str]()
    chosen = [(name, text.encode(errors="surrogatepass")) for name, text in WHOLE.items()]
    with tempfile.TemporaryDirectory() as directory:
        for index in range(arguments.cases):
            name, content = chosen[index] if index < len(chosen) else mutated(source)
            if (what := problem(Path(directory), content)) is not None:
                found[what] += 1
                if found[what] == 1:
                    print(f"{name}\n    {what}", flush=True)
    print(f"{arguments.cases} configs, {sum(found.values())} problems of {len(found)} kinds")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
