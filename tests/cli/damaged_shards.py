"""Damaged token shards: files and records that are not those of the manifest, or are and have impossible headers; and what reads them.

`python -m tests.cli.damaged_shards --cases 1000 --seed 1` runs a long campaign; tests/cli/test_damaged_shards.py runs a sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from ridgeline.loaders.manifest import Manifest
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.token_record import HEADER_BYTES, edge_crc32
from ridgeline.loaders.token_writer import WRITER_OPTIONS
from tests.cli import damaged
from tests.cli.outside import changes, own_places, state

SHARDS = 2
FIELDS = {"magic": (0, "<I"), "version": (4, "<H"), "flags": (6, "<H"), "n": (12, "<I"), "d": (16, "<I"), "vocabulary": (20, "<I")}
FIELDS |= {"first token": (24, "<Q"), "first position": (32, "<Q")}
"""Offset and format of the fields of a record (loaders/token_record.py)."""


@dataclass(frozen=True)
class Case:
    """A damage of a corpus and a command that reads it."""

    damage: str
    apply: Callable[[Path], None]
    """Damages the corpus in a directory."""
    listed: bool
    """Whether the manifest lists the damaged file: only the content of its records is wrong."""
    command: tuple[str, ...]


def make(root: Path) -> None:
    """Write a corpus of two shards in ROOT/corpus, a config that trains on it, and the outputs of the undamaged corpus."""
    texts = root / "texts"
    texts.mkdir(parents=True)
    for number in range(SHARDS):
        (texts / f"{number}.txt").write_text("".join(f"text {number}, line {line}\n" for line in range(300)))
    prepare(PrepareSettings((texts,), root / "corpus", "bytes", shards=SHARDS), workers=1)
    config = {
        "name": "small",
        "run_dir": str(root / "run"),
        "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 16},
        "data": {"train": [{"path": str(root / "corpus")}], "seq_len": 16, "batch_size": 8},
        "trainer": {"steps": 2},
        "schedule": {"warmup_steps": 0},
        "logging": {"tensorboard": False},
    }
    (root / "small.yaml").write_text(json.dumps(config))
    shutil.copytree(root / "corpus", root / "whole")


def commands(root: Path) -> list[tuple[str, ...]]:
    """The commands that read shards."""
    corpus = str(root / "corpus")
    return [
        ("data", "inspect", corpus, "--json"),
        ("data", "inspect", corpus, "--samples", "50"),
        ("data", "inspect", corpus, "--verify"),
        ("train", str(root / "small.yaml")),
    ]


def shard_files(corpus: Path) -> list[Path]:
    """Return the shards of a corpus."""
    return [corpus / info.name for info in Manifest.read(corpus).shards]


def rewrite(corpus: Path, index: int, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the records of a shard, and list the new file in the manifest as a writer would."""
    manifest = Manifest.read(corpus)
    info = manifest.shards[index]
    reader = ArrayRecordReader(str(corpus / info.name))
    records = change(list(reader.read(list(range(info.records)))))
    reader.close()
    writer = ArrayRecordWriter(str(corpus / info.name), WRITER_OPTIONS)
    for record in records:
        writer.write(record)
    writer.close()
    content = (corpus / info.name).read_bytes()
    edges = edge_crc32(records[0], records[-1]) if records else 0
    new = dataclasses.replace(info, bytes=len(content), sha256=sha256(content).hexdigest(), edge_crc32=edges)
    dataclasses.replace(manifest, shards=(*manifest.shards[:index], new, *manifest.shards[index + 1 :])).write(corpus)


def with_field(record: bytes, name: str, value: int) -> bytes:
    """Return a record with another value of a header field, and the checksum that fits it."""
    changed = bytearray(record)
    offset, kind = FIELDS[name]
    struct.pack_into(kind, changed, offset, value % (1 << 8 * struct.calcsize(kind)))
    struct.pack_into("<I", changed, 8, zlib.crc32(changed[12:]))
    return bytes(changed)


def listed_damage(source: random.Random) -> tuple[str, Callable[[Path], None]]:
    """Return a drawn damage of records in a shard that the manifest lists: its name, and what makes it."""
    index, name = source.randrange(SHARDS), source.choice(sorted(FIELDS))
    value = source.choice([0, 1, 2, 3, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    share, kind = source.random(), source.choice(["field", "field", "field", "cut", "none", "twice", "starts", "token", "noise", "long"])
    noise = source.randbytes(200)

    def change(records: list[bytes]) -> list[bytes]:
        first, *others = records
        checked = bytearray(first)
        if kind == "field":
            return [with_field(first, name, value), *others]
        if kind == "token":  # of another vocabulary
            checked[HEADER_BYTES : HEADER_BYTES + 2] = b"\xff\xff"
        elif kind == "starts":  # the last document start is far behind the record
            checked[-4:] = b"\xff\xff\xff\xff"
        if kind in ("token", "starts"):
            return [with_field(bytes(checked), "version", 1), *others]
        return {
            "cut": [first[: int(len(first) * share)], *others],
            "none": [],
            "twice": [first, *records],
            "noise": [noise, *others],
            "long": [first + bytes(50_000_000), *others],
        }[kind]

    return f"shard {index}, {kind} {name if kind == 'field' else ''} {value}", lambda corpus: rewrite(corpus, index, change)


def file_damage(source: random.Random) -> tuple[str, Callable[[Path], None]]:
    """Return a drawn damage of a file that the manifest lists otherwise: its name, and what makes it."""
    index, kind, place = source.randrange(SHARDS), source.choice(["whole", "whole", "swapped", "longer", "bit", "outside"]), source.random()
    name, apply = damaged.whole_file(source)
    bit = source.randrange(8)

    def apply_to(corpus: Path) -> None:
        files = shard_files(corpus)
        data = bytearray(files[index].read_bytes())
        if kind == "whole":
            apply(files[index])
        elif kind == "swapped":
            contents = [file.read_bytes() for file in files]
            for file, content in zip(files, reversed(contents), strict=True):
                file.write_bytes(content)
        elif kind == "longer":
            files[index].write_bytes(data + b"\0" * 100)
        elif kind == "bit":
            stored = [number for number, byte in enumerate(data) if byte]  # the rest is padding of blocks
            data[stored[int(len(stored) * place)]] ^= 1 << bit
            files[index].write_bytes(data)
        else:  # a link to a shard of the same size with other content
            outside = corpus.parent / "elsewhere"
            outside.write_bytes(data[: len(data) // 2] + data[: len(data) - len(data) // 2])
            files[index].unlink()
            files[index].symlink_to(outside)

    return f"shard {index}, {name if kind == 'whole' else kind}", apply_to


def cases(root: Path, seed: int, *, training: float) -> Iterator[Case]:
    """Yield drawn cases without end. training: share of the cases that start a training."""
    source = random.Random(seed)
    *reading, train = commands(root)
    while True:
        listed = source.random() < 0.5
        name, apply = (listed_damage if listed else file_damage)(source)
        yield Case(name, apply, listed, train if source.random() < training else source.choice(reading))


def problem(root: Path, case: Case) -> str | None:
    """Damage the corpus, run the command, restore the corpus. Return what is wrong with the answer; None when nothing is."""
    corpus, run = root / "corpus", root / "run"
    for place in (corpus, run):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root / "whole", corpus)
    case.apply(corpus)
    with own_places(root.parent) as cache:
        writable = (run, cache)
        before = state(root.parent, writable)
        code, errors, raised = damaged.guarded(list(case.command))
        changed = changes(root.parent, before, state(root.parent, writable))
    if raised is not None or changed is not None:
        return raised or changed
    if code == 2:
        lines = errors.strip().splitlines()
        named = [line for line in lines if line.startswith("ridge: error: ") and str(corpus) in line and len(line) < 1500]
        return None if len(named) == 1 and lines[-1] == named[0] else f"not one line that names the corpus: {errors[-600:]}"
    if code != 0:
        return f"exit code {code}: {errors[-300:]}"
    verifies = "--verify" in case.command or case.command[0] == "train"
    if verifies and not case.listed and any(file.read_bytes() != (root / "whole" / file.name).read_bytes() for file in shard_files(corpus)):
        return f"a shard that is not the one of the manifest is read: {case.damage}"
    return None


def main() -> None:
    """Run a campaign and print each distinct problem once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", type=float, default=0.1, help="Share of the cases that start a training.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "root"
        make(root)
        resource.setrlimit(resource.RLIMIT_AS, (damaged.MEMORY_BYTES, damaged.MEMORY_BYTES))
        drawn = cases(root, arguments.seed, training=arguments.training)
        sys.exit(damaged.campaign(drawn, arguments.cases, lambda case: problem(root, case)))


if __name__ == "__main__":
    main()
