"""Chat templates: the Jinja program of a Hugging Face tokenizer that writes a conversation as text, run as transformers runs it.

A template comes with the tokenizer and is not trusted: it runs in Jinja's sandbox and receives plain JSON values only.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_inside
from ridgeline.loaders.tokenizer_files import CONFIG_NAME, json_object

TEMPLATE_NAME = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Directory of further chat templates beside a tokenizer."""
TOOL_TEMPLATE = "tool_use"
"""Name of the further template that conversations with tools use."""
VARIABLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The special tokens that a template receives by name."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which its reasoning is published."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Mark a generation block in the output of a template: two code points that Unicode reserves and text never contains."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """A conversation that the template cannot write; the message is the reason."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `generated` are the character ranges of the template's generation blocks; None: it has none."""

    text: str
    generated: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with what its output depends on besides the conversation. Picklable."""

    text: str
    tool_text: str | None = None
    """Used for conversations with tools; None: `text` is used for all."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token and the other named special tokens."""
    date: str = "1970-01-01"
    """The day that `strftime_now` returns, so that the same input gives the same text on any day."""

    @property
    def uses_date(self) -> bool:
        """Whether the output may depend on the day."""
        return "strftime_now" in self.text + (self.tool_text or "")

    @property
    def sha256(self) -> str:
        """Digest of everything that determines the output, except the date."""
        content = json.dumps([self.text, self.tool_text, dict(self.variables)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Write a conversation. Raises TemplateError, also for text with U+FDD0 or U+FDD1."""
        source = self.text if tools is None or self.tool_text is None else self.tool_text
        values = {**self.variables, **(variables or {})}
        try:
            if any(mark in json.dumps([messages, tools, values], ensure_ascii=False) for mark in (OPEN, CLOSE)):
                raise TemplateError("the conversation contains U+FDD0 or U+FDD1, which are no characters")
            text = _compiled(source, self.date).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except TemplateError:
            raise
        except Exception as error:  # a template can fail in any way
            raise TemplateError(f"the chat template refuses it: {' '.join(str(error).split())[:200] or type(error).__name__}") from error
        return _without_marks(text) if _GENERATION.search(source) else Rendered(text, None)

    def save(self, directory: Path) -> None:
        """Write the template beside a tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TEMPLATE_NAME).write_text(self.text, encoding="utf-8")
        if self.tool_text is not None:
            (directory / TEMPLATES).mkdir(exist_ok=True)
            (directory / TEMPLATES / f"{TOOL_TEMPLATE}.jinja").write_text(self.tool_text, encoding="utf-8")


def load_chat_template(tokenizer: Path, override: Path | None = None, date: str | None = None) -> ChatTemplate:
    """Read the chat template of a tokenizer: chat_template.jinja and additional_chat_templates/, else tokenizer_config.json.

    Args:
      tokenizer: directory of the tokenizer, or a file in it.
      override: a Jinja file used instead.
      date: ISO date that the template receives as the current day; None: today.

    Raises UserError for a tokenizer without a chat template, and for a template with a syntax error.
    """
    directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = json_object(directory / CONFIG_NAME) if (directory / CONFIG_NAME).exists() else {}
    texts = {"default": _read(override)} if override is not None else _template_files(directory) or _configured(config, directory)
    if "default" not in texts:
        named = f" but only {', '.join(sorted(texts))}" if texts else ""
        raise UserError(f"{directory}: the tokenizer has no default chat template{named}; choose a file with --chat-template")
    today = date or datetime.date.today().isoformat()
    template = ChatTemplate(texts["default"], texts.get(TOOL_TEMPLATE), _special_tokens(directory, config), today)
    for name in ("default", TOOL_TEMPLATE):
        _check(texts.get(name), name, override or directory)
    return template


def _template_files(directory: Path) -> dict[str, str]:
    """Return name -> text of the .jinja files beside a tokenizer."""
    found = {path.stem: _inside(directory, path) for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    main = directory / TEMPLATE_NAME
    return {**found, "default": _inside(directory, main)} if main.exists() else found


def _configured(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Return name -> text of the templates in tokenizer_config.json: one text, or a list of names and texts."""
    value = config.get("chat_template")
    entries = value if isinstance(value, list) else [] if value is None else [{"name": "default", "template": value}]
    try:
        texts = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        texts = {"": None}
    if not all(isinstance(part, str) for item in texts.items() for part in item):
        raise UserError(f"{directory / CONFIG_NAME}: 'chat_template' must be a text, or a list of objects with 'name' and 'template'")
    return texts


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens as transformers passes them to a template."""
    beside = directory / "special_tokens_map.json"
    content = {**(json_object(beside) if beside.exists() else {}), **{name: value for name, value in config.items() if value is not None}}
    found = {}
    for name in VARIABLES:
        value = content.get(name)
        value = value.get("content") if isinstance(value, dict) else value  # older files have an AddedToken object
        if isinstance(value, str):
            found[name] = value
    return found


def _inside(directory: Path, path: Path) -> str:
    return _decoded(read_inside(directory, path), path)


def _read(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"chat template not found: {path}")
    return _decoded(path.read_bytes(), path)


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error


def _check(text: str | None, name: str, place: Path) -> None:
    import jinja2

    try:
        _compiled(text or "", "1970-01-01")
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{place}: chat template '{name}', line {error.lineno}: {error.message}") from error
    except RecursionError:
        raise UserError(f"{place}: chat template '{name}' is nested too deeply") from None


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a message without null fields and with its reasoning under the two keys that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _without_marks(text: str) -> Rendered:
    pieces, spans, start, length, depth = [], [], 0, 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            start = start if depth else length
            depth += 1
        elif piece == CLOSE:
            depth -= 1
            if not depth and length > start:
                spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return Rendered("".join(pieces), tuple(spans))


@functools.lru_cache(maxsize=8)
def _compiled(text: str, date: str) -> Any:
    return _environment(date).from_string(text)


def _environment(date: str) -> Any:
    """Return a sandbox with the names that transformers gives to templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: writes its body between two marks, in a scope of its own."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
            return nodes.Scope([first, *body, last]).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    day = datetime.datetime.fromisoformat(date)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=day.strftime)
    return environment
