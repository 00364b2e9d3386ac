"""Prompts: texts or conversations that a model continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import shortened
from ridgeline.loaders.chat_template import TemplateError, load_chat_template
from ridgeline.loaders.conversations import checked_messages
from ridgeline.loaders.tokenizers import HuggingFaceTokenizer, Tokenizer

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation, each with `role` and `content`."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model receives it."""

    text: str
    """As given, or as the chat template writes it."""
    ids: list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a file: one per line; of `.jsonl` each line is a JSON string, a list of messages, or an object with `prompt` or
    `messages`. Raises UserError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: prompts cannot be read ({error.strerror if isinstance(error, OSError) else 'not UTF-8'})") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{path}: contains no prompts")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(line, f"{path}, line {number}") for number, line in numbered]


def parse_messages(text: str, where: str) -> Prompt:
    """Return the messages of a text that is a JSON list; any other text as it is. Raises UserError for a list that is no conversation."""
    if not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return _checked(value, "messages", where) if isinstance(value, list) else text


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, directory: Path | None, *, chat: bool) -> list[EncodedPrompt]:
    """Encode prompts; an empty text is the start of a document.

    chat: with the chat template in `directory`; a text is then one message of the user. Raises UserError: a tokenizer without a chat
    template, or messages that the template refuses.
    """
    if not chat:
        if any(not isinstance(prompt, str) for prompt in prompts):
            raise UserError("prompts that are messages need --chat (chat=True)")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = zip(texts, tokenizer.encode_batch(texts), strict=True)
        return [EncodedPrompt(text, [*tokenizer.prefix, *ids] or [tokenizer.bos_id]) for text, ids in encoded]
    if not isinstance(tokenizer, HuggingFaceTokenizer) or directory is None:
        raise UserError(f"--chat needs a tokenizer.json with a chat template; the tokenizer is of kind '{tokenizer.kind}'")
    template, made = load_chat_template(directory), list[EncodedPrompt]()
    for number, prompt in enumerate(prompts, start=1):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = template.render(messages, add_generation_prompt=True).text
        except TemplateError as error:
            raise UserError(f"prompt {number}: {error}") from None
        made.append(EncodedPrompt(text, tokenizer.encode_with_special_tokens(text)[0]))
    return made


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        raise UserError(f"{where}: not JSON ({shortened(line)}); a file of plain lines must not end in .jsonl") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _checked(value, "messages", where)
    raise UserError(f"{where}: must be a text, a list of messages, or an object with 'prompt' or 'messages', got {shortened(line)}")


def _checked(value: Any, name: str, where: str) -> Prompt:
    try:
        return checked_messages(value, name)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
