"""Inputs of a preparation: which files contain the text, in which format, split into units of work.

The units depend only on names, sizes and settings, not on the machine or the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.foreign import read_object
from ridgeline.loaders.records import BadRecord, Document, Place, RecordFields
from ridgeline.loaders.remote import RemoteFile, is_url, list_remote, open_remote

FORMATS = ("auto", "text", "lines", "records", "jsonl", "json", "parquet", "arrow")
RECORD_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED_SUFFIXES = (".gz", ".zst")
BLOCK_BYTES = 4 << 20
"""Uncompressed JSONL and line-wise text files are split into units of this many bytes."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of splits in file paths, as on the Hugging Face hub; a file with none of these words belongs to `train`."""


@dataclass(frozen=True)
class InputOptions:
    """How inputs are listed. `include` and `exclude` are globs for paths below a directory; without a slash, for names at any depth."""

    format: str = "auto"
    """auto, text (a file is a document), lines (a line is a document), records (jsonl, parquet, arrow files), jsonl, json (a list of
    records), parquet or arrow."""
    split: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A file or a part of one: bytes [start, stop) for jsonl and lines, row groups for parquet; stop None: to the end."""

    path: Path
    format: str
    size_bytes: int
    start: int = 0
    stop: int | None = None
    remote: RemoteFile | None = None
    """Where `path`, a place in the cache, is copied from before it is read."""

    def place(self, number: int | None = None, skipped_bytes: int = 0) -> Place:
        """Return the place of a record of the file."""
        return Place(self.path, number, skipped_bytes, None if self.remote is None else self.remote.url)


@dataclass(frozen=True)
class SourceFormat:
    """A format of input files that an installed package reads (entry point group `ridgeline.sources`), named as its entry point."""

    read: Callable[[Unit, RecordFields], Iterator[Document | BadRecord]]
    """Yields the documents and bad records of a unit in order, the same in every process. Raises UserError when the file cannot be read."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files, such as `.warc`, for --format auto and records."""
    units: Callable[[InputFile], Iterable[Unit]] | None = None
    """Splits a file into units of work, by its content alone; None: a file is one unit."""


def source_format(name: str) -> SourceFormat:
    """Import and return the format of an installed package. Raises UserError as `plugins.load`."""
    return plugins.load("sources", name, SourceFormat, FORMATS)


@dataclass(frozen=True)
class InputFile:
    """A file to read, with size and modification time to detect changes."""

    path: Path
    name: str
    format: str
    size_bytes: int
    mtime_ns: int
    remote: RemoteFile | None = None
    """Where `path`, a place in the cache, is copied from."""


@dataclass(frozen=True)
class Listing:
    """All files to read. `notes` are choices to report to the user."""

    files: tuple[InputFile, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names, formats, sizes and modification times: changes when a file is added, removed or modified."""
        versions = [str(file.mtime_ns) if file.remote is None else file.remote.version for file in self.files]
        parts = zip(self.files, versions, strict=True)
        lines = "".join(f"{file.name}\0{file.format}\0{file.size_bytes}\0{version}\n" for file, version in parts)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(file.size_bytes for file in self.files)

    def units(self) -> list[Unit]:
        """Split the files into units. Reads the footers of Parquet files."""
        return [unit for file in self.files for unit in _split_into_units(file)]


def list_inputs(paths: Sequence[str | Path], options: InputOptions, output: Path | None = None) -> Listing:
    """List the files of `paths` in order, without those of the directory `output`, which may lie within an input.

    Raises UserError for a missing, empty or ambiguous input.
    """
    formats = plugins.all_names("sources", FORMATS)
    if options.format not in formats:
        raise unknown_name("format", options.format, formats)
    if not paths:
        raise UserError("no input; add a file or directory with --input")
    files: list[InputFile] = []
    notes: list[str] = []
    for index, given in enumerate(paths):
        if is_url(str(given)):
            files += _list_url(str(given), options, notes, index)
            continue
        path = Path(given)
        if path.is_dir():
            found = _list_directory(path, options, notes, output)
        elif path.exists():
            found = [(path, path.name, _format_of(path, options))]
        else:
            raise UserError(f"input not found: {path}")
        files += [_input_file(file, f"{index}/{name}", file_format) for file, name, file_format in found]
    return Listing(tuple(files), tuple(notes))


def _list_url(url: str, options: InputOptions, notes: list[str], index: int) -> list[InputFile]:
    """List a file or directory in a store: a directory as one of this machine, with the same choice of files and split."""
    is_directory, listed = list_remote(url)
    names = {file.name: file for file in listed}
    if is_directory:
        chosen = [name for name in names if _wanted(name, options)]
        files = _choose_files(url, [(Path(name), name) for name in chosen], options, notes)
    else:
        files = [(Path(name), name, _format_of(Path(name), options)) for name in names]
    found = [(names[name], file_format) for _, name, file_format in files]
    return [InputFile(file.path, f"{index}/{file.name}", kind, file.size_bytes, 0, file) for file, kind in found]


def _wanted(name: str, options: InputOptions) -> bool:
    """Return whether --include and --exclude select a path; an excluded directory excludes what is in it."""
    parts = name.split("/")
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    if any(_glob(pattern)(part) for pattern in options.exclude for part in above):
        return False
    return not options.include or any(_glob(pattern)(name) for pattern in options.include)


def _input_file(path: Path, name: str, file_format: str) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:  # such as a dangling link
        if file_format != "text":
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        return InputFile(path, name, file_format, 0, 0)  # becomes a bad record when it is read
    return InputFile(path, name, file_format, status.st_size, status.st_mtime_ns)


def _record_format(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        return "jsonl" if len(suffixes) > 1 and RECORD_SUFFIXES.get(suffixes[-2]) == "jsonl" else None
    return _record_suffixes().get(path.suffix)


@cache
def _record_suffixes() -> dict[str, str]:
    """Return suffix -> format of files that contain records, those of plug-ins included."""
    added = {suffix: name for name in plugins.names("sources") for suffix in source_format(name).suffixes}
    return {**added, **RECORD_SUFFIXES}


def _format_of(path: Path, options: InputOptions) -> str:
    if options.format not in ("auto", "records"):
        return options.format
    found = _record_format(path)
    if found is None and options.format == "records":
        raise UserError(f"{path}: not a record file (allowed: .jsonl[.gz|.zst], .ndjson, .parquet, .arrow; for another name set --format)")
    return found or "text"


Found = list[tuple[Path, str, str]]


def _list_directory(root: Path, options: InputOptions, notes: list[str], output: Path | None) -> Found:
    saved = _saved_dataset(root, options, notes)
    if saved is not None:
        return saved
    return _choose_files(root, [(root / name, name) for name in _walk(root, options, output)], options, notes)


def _choose_files(root: str | Path, walked: list[tuple[Path, str]], options: InputOptions, notes: list[str]) -> Found:
    """Choose what to read of the files of a directory, each given as its path and its name below `root`."""
    if not walked:
        given = "no file matches --include/--exclude" if options.include or options.exclude else "no files"
        raise UserError(f"{root}: {given}")
    if options.format not in ("auto", "records"):
        return [(path, name, options.format) for path, name in walked]
    records = [(path, name, file_format) for path, name in walked if (file_format := _record_format(path))]
    others = [name for path, name in walked if not _record_format(path)]
    if options.format == "auto" and not records:
        return [(path, name, "text") for path, name in walked]
    if not records:
        raise UserError(f"{root}: no .jsonl, .parquet or .arrow file")
    unrelated = [name for name in others if not _accompanies_dataset(name)]
    if options.format == "auto" and unrelated:
        raise UserError(
            f"{root} contains both records ({len(records)} files, such as {records[0][1]}) and other files"
            f" ({len(unrelated)}, such as {unrelated[0]}); choose with --format records, --format text or --include"
        )
    return _choose_split(root, [found for found in records if not Path(found[1]).name.startswith("cache-")], options.split, notes)


def _accompanies_dataset(name: str) -> bool:
    """Whether a hub snapshot has this file besides its data."""
    base = Path(name).name.lower()
    return base.startswith(("readme", "license")) or base.endswith((".md", ".json", ".lock", ".yaml"))


def _saved_dataset(root: Path, options: InputOptions, notes: list[str]) -> Found | None:
    """List a directory written by `save_to_disk` of the datasets library; None for any other directory."""
    if options.format not in ("auto", "records", "arrow"):
        return None
    if (root / "dataset_dict.json").is_file():
        splits = read_object(root / "dataset_dict.json").get("splits", [])
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise UserError(f"{root}: dataset_dict.json: 'splits' must be a list of names")
        split = options.split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
        if split is None or split not in splits:
            raise UserError(f"{root}: split '{split or ''}' not found; choose one with --split (allowed: {', '.join(splits)})")
        notes.append(f"{root}: reading split '{split}' of {', '.join(splits)}")
        return _saved_arrow_files(root / split, f"{split}/")
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return _saved_arrow_files(root, "")
    return None


def _saved_arrow_files(root: Path, prefix: str) -> Found:
    state = read_object(root / "state.json")
    if state.get("_indices_data_files"):
        raise UserError(f"{root}: the dataset has an indices mapping; save it again after flatten_indices()")
    entries = state.get("_data_files") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries):
        raise UserError(f"{root}: state.json: '_data_files' must be a list with a filename each")
    names = [entry["filename"] for entry in entries]
    if not names:
        raise UserError(f"{root}: state.json lists no data files")
    return [(root / name, prefix + name, "arrow") for name in names]


def _choose_split(root: str | Path, files: Found, wanted: str | None, notes: list[str]) -> Found:
    splits = {name: _split_of(name) for _, name, _ in files}
    present = sorted(set(splits.values()))
    if wanted is None:
        wanted = present[0] if len(present) == 1 else "train"
        if len(present) > 1:
            notes.append(f"{root}: reading split '{wanted}' of {', '.join(present)} (by file names; choose with --split)")
    if wanted not in present:
        raise UserError(f"{root}: split '{wanted}' not found; choose one with --split (allowed: {', '.join(present)})")
    return [found for found in files if splits[found[1]] == wanted]


def _split_of(name: str) -> str:
    words = re.split(r"[-._ /\d]+", name.lower())
    for split, aliases in SPLITS.items():
        if split != "train" and any(alias in words for alias in aliases):
            return split
    return "train"


def _walk(root: Path, options: InputOptions, output: Path | None = None) -> Iterator[str]:
    """Yield relative paths in sorted order. Hidden names, __pycache__ and `output` are skipped; links to directories are not followed."""
    skipped = None if output is None else os.path.realpath(output)
    include = [_glob(pattern) for pattern in options.include]
    exclude = [_glob(pattern) for pattern in options.exclude]

    def visit(directory: Path, prefix: str) -> Iterator[str]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"cannot read {directory}: {error.strerror}") from error
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith(".") or entry.name == "__pycache__" or any(matches(name) for matches in exclude):
                continue
            if entry.is_dir(follow_symlinks=False):
                if skipped is None or os.path.realpath(entry.path) != skipped:
                    yield from visit(directory / entry.name, name + "/")
            elif not entry.is_dir() and (not include or any(matches(name) for matches in include)):
                yield name

    return visit(root, "")


def _glob(pattern: str) -> Callable[[str], bool]:
    """Compile a glob: `*` and `?` match within a name, `**` across directories; without a slash it matches the last name."""
    pattern = pattern.rstrip("/")
    expression = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|.", pattern, flags=re.DOTALL):
        if token.startswith("[") and len(token) > 1:
            expression += "[" + ("^" + re.escape(token[2:-1]) if token[1] == "!" else re.escape(token[1:-1])).replace(r"\-", "-") + "]"
        else:
            expression += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))
    compiled = re.compile(expression, flags=re.DOTALL)
    if "/" in pattern:
        return lambda name: compiled.fullmatch(name) is not None
    return lambda name: compiled.fullmatch(name.rpartition("/")[2]) is not None


def _split_into_units(file: InputFile) -> Iterator[Unit]:
    if file.format == "parquet":
        yield from _row_groups(file)
    elif file.format not in FORMATS and (split := source_format(file.format).units) is not None:
        yield from split(file)
    elif file.format in ("jsonl", "lines") and file.path.suffix not in COMPRESSED_SUFFIXES:
        for start in range(0, max(file.size_bytes, 1), BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, file.size_bytes)
            yield Unit(file.path, file.format, stop - start, start, stop, file.remote)
    else:
        yield Unit(file.path, file.format, file.size_bytes, remote=file.remote)


def _row_groups(file: InputFile) -> Iterator[Unit]:
    import pyarrow
    import pyarrow.parquet

    try:
        with contextlib.ExitStack() as stack:
            # Of a file in a store only the footer is read here.
            source = file.path if file.remote is None else stack.enter_context(open_remote(file.remote))
            metadata = pyarrow.parquet.read_metadata(source)
    except (OSError, pyarrow.ArrowException) as error:
        place = file.path if file.remote is None else file.remote.url
        raise UserError(f"{place}: not a readable Parquet file ({error})") from error
    for group in range(metadata.num_row_groups):
        yield Unit(file.path, "parquet", metadata.row_group(group).total_byte_size, group, group + 1, file.remote)
