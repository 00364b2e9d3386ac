"""Options of the commands that write corpora: `ridge data prepare`, `train-tokenizer` and `teacher`, `ridge submit-data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import Function, Int32Range
from ridgeline.configs.environment import is_number, shortened
from ridgeline.configs.errors import UserError

_PATH = click.Path(path_type=Path)
_TEXT_OPTIONS = (
    click.option(
        "-i",
        "--input",
        "inputs",
        multiple=True,
        required=True,
        help="File, directory, or URL (s3://, gs://, hf://datasets/, https://); repeatable.",
    ),
    click.option(
        "--format",
        "input_format",
        default="auto",
        show_default=True,
        help="auto (from the file name), text (a document per file), lines, records, jsonl, json, parquet, arrow, or a plug-in's.",
    ),
    click.option("--split", help="Split of a Hugging Face dataset directory [default: train]."),
    click.option(
        "--include", multiple=True, metavar="GLOB", help="In directories, read only matching files, such as '**/*.py'; repeatable."
    ),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Skip matching files and directories; repeatable."),
    click.option("--text-field", default="text", show_default=True, help="Field of a record that contains the text."),
    click.option("--sft", is_flag=True, help="Records contain prompt and completion as raw text; the loss counts the completion."),
    click.option(
        "--holdout",
        "holdouts",
        multiple=True,
        metavar="NAME=SHARE",
        help="Hold out a share of the documents as a set of its own, such as validation=0.05; repeatable.",
    ),
    click.option("--max-bad", type=Int32Range(), default=100, show_default=True, help="Stop after more bad records than this."),
)
_CORPUS_OPTIONS = (
    click.option(
        "--chat",
        is_flag=True,
        help="Records are conversations or preference pairs: written by the tokenizer's chat template, with loss on the"
        " assistant's messages. The corpus is OUTPUT/train.",
    ),
    click.option("--chat-template", type=_PATH, help="Jinja file to use in place of the tokenizer's chat template."),
    click.option("-o", "--output", type=_PATH, required=True, help="Directory of the corpus; with --holdout, the parent of its sets."),
    click.option("--tokenizer", required=True, help="'bytes'; or a tokenizer.json, *.model or *.tiktoken file, or a directory with one."),
    click.option(
        "--bos/--no-bos",
        "add_bos",
        default=None,
        help="Begin documents with BOS (EOS where there is none) [default: as in the tokenizer's files].",
    ),
    click.option("--pack-length", type=Int32Range(), metavar="T", help="Pack whole documents into rows of T tokens (best fit)."),
    click.option("--shards", type=Int32Range(), help="Number of shard files [default: from the size of the input]."),
    click.option("--gzip-baseline", is_flag=True, help="Also store the size of each document after gzip -9, summed."),
)


def text_options(function: Function) -> Function:
    """Add the options that select the input text."""
    for option in reversed(_TEXT_OPTIONS):
        function = option(function)
    return function


def corpus_options(function: Function) -> Function:
    """Add the options that determine the content of a corpus, except --overwrite."""
    for option in reversed(_CORPUS_OPTIONS):
        function = option(function)
    return text_options(function)


def overwrite_option(function: Function) -> Function:
    """Add `--overwrite`."""
    return click.option("--overwrite", is_flag=True, help="Replace an output made with other settings or from other input.")(function)


def text_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `inputs`, `options`, `fields` and `holdouts` of the loaders' settings from the values of `text_options`."""
    from ridgeline.loaders.inputs import InputOptions
    from ridgeline.loaders.records import RecordFields, parse_holdouts

    selected = {name: values[name] for name in ("split", "include", "exclude")}
    return {
        "inputs": values["inputs"],
        "options": InputOptions(format=values["input_format"], **selected),
        "fields": RecordFields(text=values["text_field"], sft=values["sft"], chat=values.get("chat", False)),
        "holdouts": parse_holdouts(values["holdouts"]),
    }


def parse_slice(text: str) -> tuple[int, int]:
    """Return I and N of `--slice I/N`. Raises UserError."""
    index, _, count = text.partition("/")
    if not all(is_number(part) and len(part) <= 7 for part in (index, count)):
        raise UserError(f"--slice '{shortened(text)}' must be I/N, such as 0/8")
    return int(index), int(count)
