"""`ridge generate --chat` continues conversations as transformers does, and reads prompts from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline.cli.main import run
from ridgeline.launch.exit_codes import DONE, USAGE
from tests.loaders.chats import assistant, user, write_chat_tokenizer
from tests.parity.hugging_face import LLAMA, Variant, save_random_model

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compile")]
CONVERSATIONS = [[user("hello")], [{"role": "system", "content": "Be brief."}, user("a b c"), assistant("yes"), user("why?")], [user("x")]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_chat_tokenizer(tmp_path_factory.mktemp("chat") / "model", "chatml")
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(directory))
    small = {"vocab_size": vocabulary, "num_hidden_layers": 1, "max_position_embeddings": 512}
    save_random_model(Variant("llama", LLAMA | small), directory)
    return directory


def greedy(directory: Path, tokens: int) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = []
    for messages in CONVERSATIONS:
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = network.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_replies_equal_those_of_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first as a text, the second as JSON messages, the third from a file; two at a time."""
    lines: list[Any] = [{"messages": CONVERSATIONS[2]}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--prompt",
        "hello",
        "--prompt",
        json.dumps(CONVERSATIONS[1]),
        "--prompts",
        str(tmp_path / "more.jsonl"),
        "--batch-size",
        "2",
    ]
    capsys.readouterr()
    assert run(["generate", str(model), "mesh.fsdp=2", "--chat", *arguments, "--temperature", "0", "--max-tokens", "9", "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in rows] == greedy(model, 9)
    assert rows[1]["prompt"].count("Be brief.") == 1


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.jsonl", '"x"\nhello\n', [], "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n', [], "line 1: must be a text, a list of messages"),
        ("a.jsonl", '{"messages": [{"content": "x"}]}\n', ["--chat"], "messages[0] is not an object with a string 'role'"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', [], "need --chat"),
        ("a.txt", "\n", [], "contains no prompts"),
        ("a.txt", None, [], "cannot be read"),
    ],
)
def test_bad_prompts_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, options: list[str], expected: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    capsys.readouterr()
    assert run(["generate", str(model), "mesh.fsdp=1", "--prompts", str(tmp_path / name), *options]) == USAGE
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert len(error.splitlines()) == 1
