"""Every layout of chat data becomes the same conversations, from JSON lines, lists and tables; bad records are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.loaders.conversations import Conversation, Pair, conversation_from_record
from ridgeline.loaders.inputs import InputOptions, list_inputs
from ridgeline.loaders.readers import Item, read_unit
from ridgeline.loaders.records import BadRecord, Place, RecordFields
from tests.loaders.chats import RESULT, SHORT, WEATHER, assistant, tool_call, user

QUESTION, ANSWER = SHORT
SYSTEM = {"role": "system", "content": "Be brief."}


def one(record: dict[str, Any]) -> Any:
    return conversation_from_record(record, Place(Path("x.jsonl"), 1))


def read(path: Path, **options: Any) -> list[Item]:
    units = list_inputs([path], InputOptions(**options)).units()
    return [item for unit in units for item in read_unit(unit, RecordFields(chat=True))]


TURNS = [("system", "Be brief."), ("human", QUESTION["content"]), ("gpt", ANSWER["content"])]
LAYOUTS: list[dict[str, Any]] = [
    {"messages": [SYSTEM, *SHORT]},
    {"messages": SHORT, "system": "Be brief."},
    {"conversations": [{"from": sender, "value": text} for sender, text in TURNS]},
    {"conversations": SHORT, "system": "Be brief."},
    {"instruction": QUESTION["content"], "input": "", "output": ANSWER["content"], "system": "Be brief."},
    {"prompt": QUESTION["content"], "completion": ANSWER["content"], "system": "Be brief."},
    {"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]},
]


@pytest.mark.parametrize("record", LAYOUTS, ids=lambda record: "+".join(record))
def test_every_layout_gives_the_same_conversation(record: dict[str, Any]) -> None:
    found = one(record)
    assert found.messages == [SYSTEM, *SHORT]
    assert found.trained == (False, False, True)


def test_alpaca_joins_input_and_history() -> None:
    found = one({"instruction": "Add", "input": "2, 3", "output": "5", "history": [["Hi", "Hello"]]})
    assert [message["content"] for message in found.messages] == ["Hi", "Hello", "Add\n2, 3", "5"]
    assert found.trained == (False, True, False, True)


def test_a_completion_is_trained_and_not_the_replies_of_its_prompt() -> None:
    found = one({"prompt": [*SHORT, user("More?")], "completion": [assistant("No")]})
    assert found.trained == (False, False, False, True)
    found = one({"messages": [*SHORT, user("More?"), assistant("No", weight=0), user("?"), assistant("Yes", weight=1)]})
    assert found.trained == (False, True, False, False, False, True)
    assert not any("weight" in message for message in found.messages)


def test_tool_calls_and_tools_as_json_text_become_objects() -> None:
    messages = [user("?"), tool_call('{"city": "Paris"}'), RESULT, assistant("21")]
    found = one({"messages": messages, "tools": json.dumps([WEATHER])})
    assert found.messages[1] == tool_call()
    assert found.tools == [WEATHER]
    called = {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Paris"}}'}
    turns = [{"from": "human", "value": "?"}, called, {"from": "observation", "value": "21"}, {"from": "gpt", "value": "It is 21."}]
    found = one({"conversations": turns, "tools": "[]"})
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert found.trained == (False, True, False, True)
    assert found.tools is None


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": QUESTION["content"], "chosen": "Sunny", "rejected": "No idea"},
        {"prompt": [QUESTION], "chosen": [assistant("Sunny")], "rejected": [assistant("No idea")]},
        {"prompt": [QUESTION], "chosen": [QUESTION, assistant("Sunny")], "rejected": [QUESTION, assistant("No idea")]},
        {"chosen": [QUESTION, assistant("Sunny")], "rejected": [QUESTION, assistant("No idea")]},
    ],
    ids=["texts", "messages", "repeated prompt", "implicit prompt"],
)
def test_preference_pairs(record: dict[str, Any]) -> None:
    pair = one(record)
    assert isinstance(pair, Pair)
    assert pair.prompt == [QUESTION]
    assert [side.messages for side in (pair.chosen, pair.rejected)] == [[QUESTION, assistant("Sunny")], [QUESTION, assistant("No idea")]]
    assert pair.chosen.trained == pair.rejected.trained == (False, True)
    assert one({**record, "system": "Be brief."}).prompt == [SYSTEM, QUESTION]


def test_bad_records_are_named() -> None:
    for record, reason in [
        ({"text": "x"}, "no fields 'messages' or 'conversations' or 'instruction' and 'output'"),
        ({"messages": []}, "'messages' is not a non-empty list"),
        ({"messages": ["hello"]}, "messages[0] is not an object with a string 'role'"),
        ({"messages": [QUESTION]}, "no assistant message"),
        ({"messages": [QUESTION, assistant(None)]}, "messages[1] has neither 'content' nor 'tool_calls'"),
        ({"messages": [QUESTION, {"role": "assistant", "content": 3}]}, "messages[1]: 'content' is not a string but a number"),
        ({"messages": [QUESTION, assistant("x", weight=0.5)]}, "messages[1]: 'weight' must be 0 or 1"),
        ({"messages": [QUESTION, tool_call("{")]}, "messages[1].tool_calls[0].function: 'arguments' is not JSON"),
        ({"messages": SHORT, "tools": "{"}, "'tools' is not JSON"),
        ({"messages": SHORT, "system": 1}, "'system' is not a string but a number"),
        ({"conversations": [{"from": "humna", "value": "x"}]}, "did you mean 'human'?"),
        ({"instruction": "x", "output": ""}, "'output' is empty"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"chosen": [QUESTION, ANSWER], "rejected": [user("?"), ANSWER]}, "no common beginning"),
        ({"messages": [QUESTION, assistant("\ud800")]}, "lone surrogate"),
    ]:
        found = one(record)
        assert isinstance(found, BadRecord), record
        assert reason in found.reason


def test_tables_and_lists_of_records(tmp_path: Path) -> None:
    records = [{"messages": [user("?"), tool_call(), RESULT, assistant("21")], "tools": [WEATHER]}, {"messages": SHORT}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records))
    plain = [{"messages": record["messages"], "id": 1} for record in records]
    pyarrow.parquet.write_table(pa.Table.from_pylist(plain), tmp_path / "a.parquet")  # with a null for every field a message lacks
    lines, listed, table = read(tmp_path / "a.jsonl"), read(tmp_path / "a.json", format="json"), read(tmp_path / "a.parquet")
    conversations = [item for items in (lines, listed, table) for item in items if isinstance(item, Conversation)]
    assert len(conversations) == 6
    for first, second, third in zip(conversations[:2], conversations[2:4], conversations[4:], strict=True):
        assert first.messages == second.messages == third.messages
    assert str(lines[1].source) == f"{tmp_path / 'a.jsonl'}:2"
    with pytest.raises(UserError, match=r"a.json: --chat reads records .*set --format json"):
        read(tmp_path / "a.json")
    pyarrow.parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"no columns 'messages' or .* \(has: text\)"):
        read(tmp_path / "b.parquet")
