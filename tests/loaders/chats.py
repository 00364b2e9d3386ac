"""Tiny chat tokenizers with the special tokens and templates of published families, and conversations for them."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

OWN = {"chatml": "qwen", "mistral": "mistral"}
"""Templates in chat_templates/, written for these tests, with the family of each."""
TEXT = [
    "What is the weather in Paris? It is sunny, 21 degrees.\n",
    'def main():\n    return {"name": "get_weather", "arguments": {"city": "Paris"}}\n',
    "system user assistant model Grüße, 世界! 🙂 You are a helpful assistant.\n",
]
SPECIAL = {
    "llama": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "gptoss": ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"],
    "deepseek": [f"<\uff5c{name}\uff5c>" for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")],
}
"""Family -> its special tokens: the first is BOS, the second EOS (of qwen, the last)."""
ADDED = {"qwen": ["<think>", "</think>", "<tool_call>", "</tool_call>"], "deepseek": ["<think>", "</think>"]}
"""Added tokens that are not special: they are tokens in any text."""
PARAMETERS = {"type": "object", "properties": {}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}


def template_file(template: str) -> Path:
    """One of OWN, else the published template of that name: the package `trl` (extra `parity`) has them as files."""
    if template in OWN:
        return Path(__file__).with_name("chat_templates") / f"{template}.jinja"
    return Path(str(importlib.metadata.distribution("trl").locate_file(f"trl/chat_templates/{template}.jinja")))


def write_chat_tokenizer(directory: Path, template: str, **config: Any) -> Path:
    """Write a tiny byte-level BPE with the special tokens of a template's family, and the template."""
    directory.mkdir(parents=True, exist_ok=True)
    name = OWN.get(template) or next(name for name in SPECIAL if template.startswith(name))
    (directory / "tokenizer.json").write_text(_tokenizer_json(name))
    bos, eos = SPECIAL[name][0], SPECIAL[name][-1 if name == "qwen" else 1]
    names = {"eos_token": eos} | ({} if name == "qwen" else {"bos_token": bos})
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}))
    (directory / "chat_template.jinja").write_text(template_file(template).read_text())
    return directory


@functools.cache
def _tokenizer_json(name: str) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL[name], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED.get(name, [])])
    bos = SPECIAL[name][0]
    level = processors.ByteLevel(trim_offsets=True)  # as Llama 3 has it: white space is outside of the offsets
    single = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = level if name == "qwen" else processors.Sequence([level, single])
    return tokenizer.to_str()


def user(text: Any) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **more}


def tool_call(arguments: Any = None) -> dict[str, Any]:
    """A message of the assistant that calls the tool."""
    call = {"id": "abcdef123", "type": "function", "function": {"name": "get_weather", "arguments": arguments or {"city": "Paris"}}}
    return {"role": "assistant", "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"degrees": 21}'}
SHORT = [user("What is the weather?"), assistant("Sunny 🙂")]
LONG = [user(" Hi "), assistant(" Hello, 世界!\n"), user("And now?"), assistant("  Still here."), user("?"), assistant("Bye\n\n🙂")]
SYSTEM = [{"role": "system", "content": "You are a helpful assistant."}, *LONG]
REASONED = [user("2 + 2?"), assistant("4", reasoning_content="Add."), user("Sure?"), assistant("Yes", reasoning_content="Check it.")]
TOOLS = [user("Weather in Paris?"), tool_call(), RESULT, assistant("It is 21 degrees."), user("Thanks"), assistant("Gladly")]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "short": (SHORT, None),
    "long": (LONG, None),
    "system": (SYSTEM, None),
    "reasoned": (REASONED, None),
    "tools": (TOOLS, [WEATHER]),
    "tools given": (LONG, [WEATHER]),
}
