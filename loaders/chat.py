"""Conversations as tokens: the template's text with its special tokens as tokens, and the loss on the assistant's messages only.

The assistant's part of the text comes from the template's generation blocks. A template without them is asked for prefixes: message i
begins where the conversation before it, with the prompt for a reply, ends, and ends where the conversation up to it ends. Some templates
write a message differently when it is not the last one (they drop its reasoning, or end it with another token), so each prefix is compared
with the whole text; where it differs, the message is found by changing it and comparing the two texts. A message that is not found either
way is an error, never a guess.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.loaders.chat_template import ChatTemplate, Rendered, TemplateError
from ridgeline.loaders.conversations import Conversation
from ridgeline.loaders.tokenizers import HuggingFaceTokenizer, Tokenizer

PROBE = "\ue0c5"
"""A private-use character that is put into a message to find it in the text."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. Others are allowed where the template names them."""
Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens."""

    text: str
    ids: np.ndarray
    """int32 [n], as `apply_chat_template` of transformers returns them."""
    loss_mask: np.ndarray
    """bool [n], True where the token counts as a target."""


class ChatEncoder:
    """Encodes conversations with a template and its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises UserError for a tokenizer without special tokens in its text (only a tokenizer.json has them)."""
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(f"--chat needs a tokenizer.json; the tokenizer is of kind '{tokenizer.kind}'")
        self.tokenizer, self.template = tokenizer, template

    def encode(self, conversation: Conversation) -> EncodedChat:
        """Encode a conversation. Raises TemplateError when the template refuses it, or an assistant message is not found in its text."""
        for index, message in enumerate(conversation.messages):
            role = message["role"]
            if role not in ROLES and not any(f"{quote}{role}{quote}" in self.template.text for quote in "'\""):
                raise TemplateError(f"messages[{index}]: {unknown_name('role', role, ROLES)}")
        conversation, rendered = self._written(conversation)
        self._check_written(conversation, rendered.text)
        spans = self._spans(conversation, rendered)
        ids, offsets = self.tokenizer.encode_with_special_tokens(rendered.text)
        if len(ids) < 2:
            raise TemplateError("the chat template writes less than two tokens")
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        starts = np.where(starts == ends, np.append(0, ends[:-1]), starts)  # a tokenizer may leave spaces out of its ranges
        mask = np.zeros(len(ids), bool)
        for start, end in spans:
            mask |= (ends > start) & (starts < end)
        if not mask.any():
            raise TemplateError("the assistant's messages have no tokens in the text of the chat template")
        return EncodedChat(rendered.text, np.array(ids, np.int32), mask)

    def _written(self, conversation: Conversation) -> tuple[Conversation, Rendered]:
        """Write a conversation; lists of texts become one text each where the template does not read lists."""
        lists = [message for message in conversation.messages if isinstance(message.get("content"), list)]
        try:
            rendered = self._render(conversation, conversation.messages)
            if not lists or "{'type'" not in rendered.text:  # else the template writes the list as Python shows it
                return conversation, rendered
        except TemplateError:
            if not lists:
                raise
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for message in lists for part in message["content"]):
            raise TemplateError("the chat template does not read a list as the content of a message")
        joined = [
            {**message, "content": "\n".join(part["text"] for part in message["content"])} if message in lists else message
            for message in conversation.messages
        ]
        conversation = replace(conversation, messages=joined)
        return conversation, self._render(conversation, joined)

    def _check_written(self, conversation: Conversation, text: str) -> None:
        """Raise TemplateError for an assistant's message of which the text has no content or no tool call."""
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            calls = [str(call.get("function", call).get("name")) for call in message.get("tool_calls") or []]
            if missing := next((name for name in calls if name not in text), None):
                raise TemplateError(f"messages[{index}]: the chat template does not write the tool call '{missing[:40]}'")
            content = message.get("content")
            if not isinstance(content, str) or content.strip() in text:
                continue
            others = [*conversation.messages[:index], _changed(message), *conversation.messages[index + 1 :]]
            if self._try(conversation, others, False) == text:
                raise TemplateError(f"messages[{index}]: the chat template does not write its content")

    def _render(self, conversation: Conversation, messages: Sequence[Any], prompt: bool = False) -> Rendered:
        return self.template.render(messages, conversation.tools, conversation.variables, prompt)

    def _spans(self, conversation: Conversation, rendered: Rendered) -> list[Span]:
        """Return the character ranges of the text that the loss counts, in order."""
        roles = [message["role"] for message in conversation.messages]
        turns = [index for index, role in enumerate(roles) if role == "assistant"]
        everything = all(conversation.trained[index] for index in turns)
        if rendered.generated is not None and everything:
            return list(rendered.generated)
        located = _Locator(rendered.text, conversation.messages, lambda messages, prompt: self._try(conversation, messages, prompt)).spans()
        spans = [span for index, span in located if conversation.trained[index]]
        if rendered.generated is None:
            return spans
        return [block for block in rendered.generated if any(start < block[1] and block[0] < end for start, end in spans)]

    def _try(self, conversation: Conversation, messages: Sequence[Any], prompt: bool) -> str | None:
        """Return the text of other messages; None when the template refuses them."""
        try:
            return self._render(conversation, messages, prompt).text
        except TemplateError:
            return None


class _Locator:
    """Finds the assistant's messages in the text of a conversation."""

    def __init__(self, text: str, messages: Sequence[Any], render: Callable[[Sequence[Any], bool], str | None]) -> None:
        self.text, self.messages, self.render = text, messages, render

    def spans(self) -> list[tuple[int, Span]]:
        """Return (number of the message, its range) of each assistant message, in order. Raises TemplateError."""
        found: list[tuple[int, Span]] = []
        end = 0
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            span = self._span(index, end)
            if span is None:
                raise TemplateError(f"messages[{index}]: the assistant's part is not found in the text of the chat template")
            found.append((index, span))
            end = span[1]
        return found

    def _span(self, index: int, earliest: int) -> Span | None:
        before = self.render(self.messages[:index], True)
        through = self.text if index == len(self.messages) - 1 else self.render(self.messages[: index + 1], False)
        if before is not None and through is not None and self.text.startswith(through) and through.startswith(before):
            span = len(before), len(through)
            return span if earliest <= span[0] < span[1] else None
        probe = self._probe(index)
        if before is None or through is None or probe is None:
            return None
        first, last = _common_prefix(self.text, probe), len(self.text) - _common_suffix(self.text, probe)
        start = len(before) if self.text.startswith(before) else self._after_header(index, before)
        end = len(through) if self.text.startswith(through) else self._after_end(index, through, last)
        if start is None or end is None:
            return None
        return (start, end) if earliest <= start <= first and last <= end and start < end else None

    def _after_header(self, index: int, before: str) -> int | None:
        """Return the end of the prompt for a reply, which follows the last changed character of a changed message before."""
        base, probe = self.render(self.messages[:index], False), self._probe(index - 1) if index else None
        changed = self.render([*self.messages[: index - 1], _changed(self.messages[index - 1])], True) if index else None
        if base is None or probe is None or changed is None:
            return None
        content_end = len(self.text) - _common_suffix(self.text, probe)
        header = before[len(before) - _common_suffix(before, changed) :]
        prompt = len(before) - _common_prefix(base, before)
        for length in range(len(header), len(header) - max(prompt, 1), -1):  # the prompt may go on: with an opened reasoning block
            if self.text.startswith(header[:length], content_end) and (length == len(header) or header[length - 1] in "\n>"):
                return content_end + length
        return None

    def _after_end(self, index: int, through: str, content_end: int) -> int | None:
        """Return the end of a message that is not the last, whose content ends at `content_end`: after what ends it when it is the last."""
        changed = self.render([*self.messages[:index], _changed(self.messages[index])], False)
        if changed is None:
            return None
        ending = through[len(through) - _common_suffix(through, changed) :]
        if self.text.startswith(ending, content_end):
            return content_end + len(ending)
        # The template ends the last message with a token of its own, such as <|return|> in place of <|end|>.
        space = len(ending) - len(ending.lstrip())
        if not self.text.startswith(ending[:space], content_end):
            return None
        content_end, ending = content_end + space, ending[space:]
        token = self.text[content_end : self.text.find(">", content_end) + 1]
        following = self.render([*self.messages[: index + 1], {"role": "user", "content": PROBE}], False)
        body = through[: len(through) - len(ending)]
        same_form = token.startswith("<") and ending.startswith("<") and ending.endswith(">")
        return content_end + len(token) if same_form and following is not None and body[-32:] + token in following else None

    def _probe(self, index: int) -> str | None:
        """Return the text of the conversation with message `index` changed; None when the text does not change."""
        messages = [*self.messages[:index], _changed(self.messages[index]), *self.messages[index + 1 :]]
        text = self.render(messages, False)
        return None if text == self.text else text


def _changed(message: Any) -> dict[str, Any]:
    """Return a copy of a message with PROBE at the ends of its content, inside outer white space that a template may strip."""
    other = copy.deepcopy(dict(message))
    content = other.get("content")
    if isinstance(content, str) and content.strip():
        other["content"] = _framed(content)
    elif isinstance(content, list) and any(isinstance(part, dict) and part.get("text") for part in content):
        texts = [part for part in content if isinstance(part, dict) and part.get("text")]
        texts[0]["text"], texts[-1]["text"] = _framed(texts[0]["text"]), _framed(texts[-1]["text"])
    if other.get("tool_calls"):
        call = other["tool_calls"][-1]
        call = call.get("function", call)
        call["arguments"] = {**call["arguments"], PROBE: PROBE} if isinstance(call.get("arguments"), dict) else PROBE
    return other


def _framed(text: str) -> str:
    inner = text.strip()
    place = text.index(inner)
    return text[:place] + PROBE + inner + PROBE + text[place + len(inner) :]


def _common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _common_suffix(a: str, b: str) -> int:
    return _common_prefix(a[::-1], b[::-1])
