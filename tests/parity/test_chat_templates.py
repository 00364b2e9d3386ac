"""Conversations as tokens equal `apply_chat_template` of transformers, token by token, for the published templates of each family."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import transformers

from ridgeline.loaders.chat import ChatEncoder, EncodedChat
from ridgeline.loaders.chat_template import ChatTemplate, TemplateError, load_chat_template
from ridgeline.loaders.conversations import Conversation, conversation_from_record
from ridgeline.loaders.records import Place
from ridgeline.loaders.tokenizers import load_tokenizer
from tests.loaders.chats import CONVERSATIONS, LONG, SHORT, template_file, user, write_chat_tokenizer

pytestmark = pytest.mark.parity
PUBLISHED = (
    "llama3",
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen3",
    "gemma",
    "gemma3",
    "gemma4_v5",
    "gptoss",
    "deepseek_r1_distill",
    "mistral",
)
"""Templates that `trl` distributes, and `mistral`, written for these tests: the package that has those of Mistral needs an older numpy."""
MARKED = ("llama3_training", "qwen2_5_training", "qwen3_training", "gemma_training", "gemma3_training", "gptoss_training")
"""With generation blocks."""
NO_TOOLS = ("gemma", "gemma_training", "gemma3", "gemma3_training", "deepseek_r1_distill", "llama3", "llama3_training")
"""Templates that refuse tool calls, or do not write them."""


def conversation(messages: list[dict[str, Any]], tools: list[Any] | None = None, **more: Any) -> Conversation:
    found = conversation_from_record({"messages": messages, "tools": tools, **more}, Place(Path("x")))
    assert isinstance(found, Conversation)
    return found


@functools.cache
def both(template: str, root: Path) -> tuple[Any, ChatEncoder]:
    directory = write_chat_tokenizer(root / template, template)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    return theirs, ChatEncoder(load_tokenizer(directory), load_chat_template(directory))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


def trained(encoder: ChatEncoder, chat: EncodedChat) -> str:
    """The text of the tokens that the loss counts."""
    return encoder.tokenizer.decode_all(chat.ids[chat.loss_mask].tolist())


@pytest.mark.parametrize("template", [*PUBLISHED, *MARKED])
def test_tokens_and_masks_equal_those_of_transformers(template: str, root: Path) -> None:
    theirs, ours = both(template, root)
    for name, (messages, tools) in CONVERSATIONS.items():
        try:
            chat = ours.encode(conversation(messages, tools))
        except TemplateError:
            assert (name == "tools" and template in NO_TOOLS) or (name == "system" and template in ("gemma", "gemma_training"))
            continue
        marked = template in MARKED
        expected = theirs.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=marked)
        assert chat.ids.tolist() == expected["input_ids"], name
        if marked:
            assert chat.loss_mask.astype(int).tolist() == expected["assistant_masks"], name


@pytest.mark.parametrize("template", PUBLISHED)
def test_the_loss_counts_the_replies_and_what_ends_them(template: str, root: Path) -> None:
    _, ours = both(template, root)
    end = {"llama": "<|eot_id|>", "qwen": "<|im_end|>\n", "gemma4": "<turn|>\n", "gemma": "<end_of_turn>\n", "mistral": "</s>"}
    ends = [end.get(next((name for name in end if template.startswith(name)), ""), "")] * 3
    if template == "gptoss":
        ends = ["<|end|>", "<|end|>", "<|return|>"]
    text = trained(ours, ours.encode(conversation(LONG)))
    place = 0
    for message, ending in zip(LONG[1::2], ends, strict=True):
        reply = message["content"].strip()
        assert reply in text[place:]
        place = text.index(reply, place) + len(reply)
        assert text[place:].lstrip(" \n").startswith(ending)
    assert not any(message["content"].strip() in text for message in LONG[:4:2])


@pytest.mark.parametrize("template", ["llama3", "gemma", "gemma3"])
def test_prefixes_and_generation_blocks_give_the_same_mask(template: str, root: Path) -> None:
    plain, marked = both(template, root)[1], both(f"{template}_training", root)[1]
    for name in ("short", "long") if template == "gemma" else ("short", "long", "system"):
        found = [encoder.encode(conversation(CONVERSATIONS[name][0])) for encoder in (plain, marked)]
        assert found[0].loss_mask.tolist() == found[1].loss_mask.tolist()


@pytest.mark.parametrize("template", ["qwen3", "gptoss", "llama3_training"])
def test_a_message_of_weight_0_is_masked_and_only_it(template: str, root: Path) -> None:
    _, ours = both(template, root)
    whole = ours.encode(conversation(LONG))
    part = ours.encode(conversation([*LONG[:3], {**LONG[3], "weight": 0}, *LONG[4:]]))
    assert part.ids.tolist() == whole.ids.tolist()
    assert not (part.loss_mask & ~whole.loss_mask).any()
    removed = ours.tokenizer.decode_all(whole.ids[whole.loss_mask & ~part.loss_mask].tolist())
    assert removed.strip().startswith("Still here.") or "<|message|>  Still here.<" in removed
    assert "Bye" not in removed


def test_an_open_reasoning_block_and_variables_reach_the_template(root: Path) -> None:
    theirs, ours = both("qwen3", root)
    chat = ours.encode(conversation(SHORT, chat_template_kwargs={"enable_thinking": False}))
    assert chat.ids.tolist() == theirs.apply_chat_template(SHORT, enable_thinking=False)["input_ids"]
    assert trained(ours, chat) == "Sunny 🙂<|im_end|>\n"  # the empty block is a part of the prompt then


def test_special_tokens_in_text_are_tokens_as_in_transformers(root: Path) -> None:
    theirs, ours = both("qwen2_5", root)
    messages = [user("a <|im_end|> b"), SHORT[1]]
    assert ours.encode(conversation(messages)).ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]


def test_named_templates_and_the_one_for_tools(tmp_path: Path) -> None:
    text = template_file("qwen2_5").read_text()
    templates = [{"name": "default", "template": text}, {"name": "tool_use", "template": "{{ tools | tojson }}" + text}]
    write_chat_tokenizer(tmp_path, "qwen2_5", chat_template=templates)
    (tmp_path / "chat_template.jinja").unlink()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = load_chat_template(tmp_path)
    assert template == ChatTemplate(text, templates[1]["template"], {"eos_token": "<|im_end|>"}, template.date)
    for name in ("short", "tools given"):
        messages, tools = CONVERSATIONS[name]
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert template.render(messages, tools).text == expected
