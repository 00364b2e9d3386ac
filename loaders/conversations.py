"""Records of chat data as conversations and preference pairs, in the layouts that data sets are published in.

    {"messages": [{"role": R, "content": C}, ...], "tools": [...]}           OpenAI; an assistant message may have "weight": 0 (no loss)
    {"conversations": [{"from": F, "value": V}, ...], "system", "tools"}     ShareGPT
    {"instruction": I, "input": X, "output": O, "system", "history"}         Alpaca
    {"prompt": P, "completion": C}                                           P and C are texts or lists of messages
    {"prompt": P, "chosen": C, "rejected": R}                                a preference pair; without "prompt", C and R are whole
                                                                             conversations with the same beginning

A text stands for one message: of the user in a prompt, of the assistant elsewhere. Any layout may have "chat_template_kwargs", values that
the template receives by name. The loss counts the assistant's messages, of a completion or pair only those after the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.errors import unknown_name
from ridgeline.loaders.records import BadRecord, Place, type_name

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
LAYOUTS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"), ("chosen", "rejected"))
"""The fields that identify a layout; the last is looked for first."""
FIELDS = (*(name for layout in LAYOUTS for name in layout), "input", "system", "history", "tools", "chat_template_kwargs")
"""All fields that are read."""
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template reads them. `trained` has one value per message: whether the loss counts it."""

    messages: Messages
    trained: tuple[bool, ...]
    tools: list[Any] | None
    variables: dict[str, Any]
    """Further values for the template."""
    source: Place

    @property
    def key(self) -> str:
        """Text that is equal for equal conversations; held-out sets are drawn by it."""
        return json.dumps(self.messages, sort_keys=True, default=str)


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt, of which the first is preferred."""

    chosen: Conversation
    rejected: Conversation
    prompt: Messages
    source: Place

    @property
    def key(self) -> str:
        """Text that is equal for pairs with the same prompt: they are in the same set."""
        return json.dumps(self.prompt, sort_keys=True, default=str)


class _Refused(ValueError):
    """A record that is not usable."""


def conversation_from_record(record: Mapping[str, Any], source: Place) -> Conversation | Pair | BadRecord:
    """Return the conversation or pair of a record, or a BadRecord with the reason."""
    try:
        item = _pair(record, source) if "chosen" in record and "rejected" in record else _conversation(record, source)
        json.dumps([record[name] for name in FIELDS if name in record], ensure_ascii=False, default=str).encode()
        return item
    except UnicodeEncodeError:
        return BadRecord(source, "invalid UTF-8: a lone surrogate")
    except _Refused as refused:
        return BadRecord(source, str(refused))


def _conversation(record: Mapping[str, Any], source: Place) -> Conversation:
    first = 0
    if "messages" in record:
        messages = checked_messages(record["messages"], "messages")
    elif "conversations" in record:
        messages = _sharegpt(record["conversations"])
    elif "instruction" in record and "output" in record:
        messages = _alpaca(record)
    elif "prompt" in record and "completion" in record:
        messages = _turns(record["prompt"], "prompt", "user")
        first = len(messages)
        messages += _turns(record["completion"], "completion", "assistant")
    else:
        has = ", ".join(list(map(str, record))[:8]) or "nothing"
        wanted = " or ".join(" and ".join(f"'{name}'" for name in names) for names in LAYOUTS)
        raise _Refused(f"no fields {wanted} (has: {has})")
    return _checked(record, _with_system(record, messages), first + _has_system(record, messages), source)


def _pair(record: Mapping[str, Any], source: Place) -> Pair:
    sides = [_turns(record[name], name, "assistant") for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = _turns(record["prompt"], "prompt", "user")
        starts = [side[: len(prompt)] == prompt for side in sides]  # some data sets repeat the prompt in both
        sides = [side if repeated else prompt + side for side, repeated in zip(sides, starts, strict=True)]
    else:
        common = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        prompt = sides[0][:common]
        if not prompt:
            raise _Refused("'chosen' and 'rejected' have no common beginning, and there is no 'prompt'")
    if sides[0] == sides[1]:
        raise _Refused("'chosen' and 'rejected' are equal: nothing to prefer")
    added = _has_system(record, prompt)
    chosen, rejected = (_checked(record, _with_system(record, side), len(prompt) + added, source) for side in sides)
    return Pair(chosen, rejected, chosen.messages[: len(prompt) + added], source)


def _has_system(record: Mapping[str, Any], messages: Messages) -> int:
    """Return 1 when the record's field 'system' becomes a message, else 0."""
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise _Refused(f"field 'system' is not a string but {type_name(system)}")
    return int(bool(system) and not (messages and messages[0]["role"] == "system"))


def _with_system(record: Mapping[str, Any], messages: Messages) -> Messages:
    return [{"role": "system", "content": record["system"]}, *messages] if _has_system(record, messages) else messages


def _checked(record: Mapping[str, Any], messages: Messages, first: int, source: Place) -> Conversation:
    """Return the conversation of messages; the loss counts the assistant's from number `first` on."""
    trained, plain = [], []
    for index, message in enumerate(messages):
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise _Refused(f"messages[{index}]: 'weight' must be 0 or 1, got {str(weight)[:20]}")
        trained.append(index >= first and message["role"] == "assistant" and weight != 0)
        plain.append({key: value for key, value in message.items() if key != "weight"})
    if not any(trained):
        raise _Refused("no assistant message to learn from")
    variables = record.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise _Refused(f"field 'chat_template_kwargs' is not an object but {type_name(variables)}")
    return Conversation(plain, tuple(trained), _tools(record.get("tools")), dict(variables or {}), source)


def _tools(value: Any) -> list[Any] | None:
    """Return the tools of a record: a list of JSON schemas, or its JSON text; None when there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise _Refused(f"field 'tools' is not JSON: {error}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)):
        raise _Refused("field 'tools' is not a list of objects")
    return value or None


def _turns(value: Any, name: str, role: str) -> Messages:
    """Return the messages of a field that is one text of a role, or a list of messages."""
    if not isinstance(value, str):
        return checked_messages(value, name)
    if not value:
        raise _Refused(f"field '{name}' is empty")
    return [{"role": role, "content": value}]


def checked_messages(value: Any, name: str) -> Messages:
    """Return a list of messages as templates read it. `name`: of the field, for messages. Raises ValueError."""
    if not isinstance(value, list) or not value:
        raise _Refused(f"field '{name}' is not a non-empty list")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Check a message and return it without null fields; the arguments of its tool calls become objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _Refused(f"{where} is not an object with a string 'role'")
    kept = {key: value for key, value in message.items() if value is not None}
    if "content" not in kept and not kept.get("tool_calls"):
        raise _Refused(f"{where} has neither 'content' nor 'tool_calls'")
    if not isinstance(kept.get("content", ""), str | list):
        raise _Refused(f"{where}: 'content' is not a string but {type_name(kept['content'])}")
    calls = kept.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise _Refused(f"{where}: 'tool_calls' is not a list of objects")
        kept["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        if not calls:
            del kept["tool_calls"]
    return kept


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object: OpenAI's files have them as JSON text, templates write them as JSON."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        return {**call, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError) as error:
        raise _Refused(f"{where}: 'arguments' is not JSON: {error}") from None


def _sharegpt(value: Any) -> Messages:
    if not isinstance(value, list) or not value:
        raise _Refused("field 'conversations' is not a non-empty list")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return checked_messages(value, "conversations")
    messages: Messages = []
    for index, turn in enumerate(value):
        sender, text = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else (None, None)
        if not isinstance(sender, str) or not isinstance(text, str):
            raise _Refused(f"conversations[{index}] has no string 'from' and 'value'")
        role = SHAREGPT_ROLES.get(sender)
        if role is None:
            raise _Refused(f"conversations[{index}]: {unknown_name('sender', sender, SHAREGPT_ROLES)}")
        weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
        if role == "function_call":
            messages.append({"role": "assistant", "tool_calls": _function_calls(text, index), **weight})
        else:
            messages.append({"role": role, "content": text, **weight})
    return messages


def _function_calls(text: str, index: int) -> list[dict[str, Any]]:
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"conversations[{index}]: the function call is not JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise _Refused(f"conversations[{index}]: a function call has no string 'name'")
    return [{"type": "function", "function": _call(call, f"conversations[{index}]")} for call in calls]


def _alpaca(record: Mapping[str, Any]) -> Messages:
    for name in ("instruction", "input", "output"):
        if not isinstance(record.get(name) or "", str):
            raise _Refused(f"field '{name}' is not a string but {type_name(record[name])}")
    if not record["instruction"] or not record["output"]:
        raise _Refused(f"field '{'output' if record['instruction'] else 'instruction'}' is empty")
    messages: Messages = []
    for index, turn in enumerate(record.get("history") or []):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise _Refused(f"history[{index}] is not a list of two strings")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = record["instruction"] + ("\n" + record["input"] if record.get("input") else "")
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
