"""Tasks of lm-evaluation-harness give the same scores here as with the harness's own Hugging Face backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from ridgeline.cli.main import run
from ridgeline.configs.errors import UserError
from ridgeline.launch.exit_codes import DONE, USAGE
from tests.loaders.chats import write_chat_tokenizer
from tests.parity.hugging_face import LLAMA, Variant, save_random_model

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compile")]
CAPITALS = [("France", "Paris"), ("Japan", "Tokyo"), ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Chad", "N'Djamena")]
CHOICES = [capital for _, capital in CAPITALS[:3]]
TASKS = {
    "capital": """
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_target: "{{choices.index(capital)}}"
doc_to_choice: choices
num_fewshot: 1
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "word": """
output_type: loglikelihood
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{capital}}"
num_fewshot: 2
fewshot_split: test
metric_list:
  - metric: perplexity
""",
    "answer": """
output_type: generate_until
doc_to_text: "Q: {{country}}\\nA:"
doc_to_target: "{{reply}}"
generation_kwargs:
  until: [" x", "\\n\\n"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer that puts BOS before texts; its positions are fewer than the long text has tokens."""
    directory = write_chat_tokenizer(tmp_path_factory.mktemp("harness") / "model", "llama3")
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(directory))
    small = {"vocab_size": vocabulary, "num_hidden_layers": 2, "max_position_embeddings": 96, "num_key_value_heads": 2}
    save_random_model(Variant("llama", LLAMA | small), directory)
    return directory


@pytest.fixture(scope="module")
def harness(model: Path) -> Any:
    """The harness's own backend."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, model: Path, harness: Any) -> Path:
    """Task files with their data. The replies to match are the model's own for every other question."""
    from lm_eval.api.instance import Instance

    directory = tmp_path_factory.mktemp("tasks")
    settings = {"until": [" x", "\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = [Instance("generate_until", {}, (f"Q: {country}\nA:", settings), index) for index, (country, _) in enumerate(CAPITALS)]
    replies = harness.generate_until(asked)
    rows = [
        {"country": country, "capital": CHOICES[index % 3], "choices": CHOICES, "text": f"{country}: {capital}. " * (1 + 6 * index)}
        | {"reply": replies[index] if index % 2 else "no"}
        for index, (country, capital) in enumerate(CAPITALS)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {directory / 'rows.jsonl'}\ntest_split: test\n"
        (directory / f"{name}.yaml").write_text(f"task: tiny_{name}\n{data}{text}metadata:\n  version: 1\n")
    return directory


@pytest.fixture(autouse=True, scope="module")
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


def test_scores_equal_those_of_the_harness(model: Path, tasks: Path, harness: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = [f"tiny_{name}" for name in TASKS]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, log_samples=False, bootstrap_iters=0)["results"]
    capsys.readouterr()
    command = ["evaluate", str(model), "mesh.fsdp=2", "mesh.tensor=2", "--tasks", ",".join(names), "--tasks-dir", str(tasks)]
    assert run([*command, "--batch-size", "4", "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in rows} == set(names)
    assert {row["devices"] for row in rows} == {"4 CPU devices (mesh fsdp=2 x tensor=2) of 8"}
    for row in rows:
        assert row["value"] == pytest.approx(expected[row["task"]][row["metric"]], rel=1e-4), row
        assert row["samples"] == len(CAPITALS)
    values = {row["metric"]: row["value"] for row in rows}
    assert values["exact_match,none"] == 0.4  # else equal scores would say little
    assert len(values) == 6
    (word,) = (row for row in rows if row["task"] == "tiny_word")
    assert word["stderr"] > 0  # by resampling, of which the harness prints a line


def test_log_likelihoods_and_texts_equal_those_of_the_harness(model: Path, harness: Any) -> None:
    from lm_eval.api.instance import Instance

    from ridgeline.models.generate import generation_config
    from ridgeline.trainer.harness import HarnessModel
    from ridgeline.trainer.pretrained import load_model

    loaded = load_model(model, adapt=generation_config, mesh=["mesh.fsdp=2", "mesh.tensor=2"])
    ours = HarnessModel(loaded.decoder, loaded.tokenizer, loaded.eos_ids, batch_size=4)
    pairs = [("The capital", " of France"), ("", "sunny"), ("What is ", "the weather? "), ("word " * 60, "end"), ("a", " b" * 40)]
    pairs.append(("<|begin_of_text|>The", " capital"))
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for (nats, greedy), (their_nats, their_greedy) in zip(ours.loglikelihood(asked), harness.loglikelihood(asked), strict=True):
        assert nats == pytest.approx(their_nats, abs=1e-4)
        assert greedy == their_greedy
    context = harness.tok_encode("The")
    assert ours._loglikelihood_tokens([(None, context, greedy_token(harness, context))])[0][1] is True
    whole = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("sunny", "What is the weather in Paris? " * 20)]
    assert ours.loglikelihood_rolling(whole) == pytest.approx(harness.loglikelihood_rolling(whole), abs=1e-3)


def test_each_evaluation_has_the_same_examples_in_its_prompts(model: Path, tasks: Path) -> None:
    from ridgeline.models.generate import generation_config
    from ridgeline.trainer.harness import HarnessModel, Tasks
    from ridgeline.trainer.pretrained import load_model

    class Recorded(HarnessModel):
        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            asked.append([context for _, context, _ in requests])
            return super()._loglikelihood_tokens(requests)

    asked: list[Any] = []
    loaded, wanted = load_model(model, adapt=generation_config), Tasks(["tiny_word"], tasks)
    adapter = Recorded(loaded.decoder, loaded.tokenizer, loaded.eos_ids, batch_size=4)
    assert wanted.evaluate(adapter) == wanted.evaluate(adapter)
    assert asked[0] == asked[1]
    assert len(asked) == 2


def test_a_task_that_generates_more_tokens_than_the_model_has_is_refused_before_training(tasks: Path) -> None:
    from ridgeline.trainer.harness import Tasks

    answer = Tasks(["tiny_answer"], tasks)
    answer.check_length(13)
    with pytest.raises(UserError, match=r"a task generates 12 tokens; model.max_seq_len is 12"):
        answer.check_length(12)


def greedy_token(harness: Any, context: list[int]) -> list[int]:
    import torch

    logits = harness._model_call(torch.tensor([context]))
    return [int(logits[0, -1].argmax())]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tasks", "arc_esy", "--tasks-dir", "{tasks}"], "unknown task 'arc_esy'; did you mean 'arc_easy'?"),
        (["--tasks", "broken", "--tasks-dir", "{broken}"], "task broken: cannot be loaded (FileNotFoundError"),
        (["--tasks", "unsafe", "--tasks-dir", "{broken}"], "task unsafe runs code that the model writes"),
        (["--tasks", "x", "--tasks-dir", "{empty}"], "contains no task files"),
        (["--tasks", "x", "--set", "a=b"], "--tasks does not go with --set"),
        (["--limit", "3"], "need --tasks NAME"),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused(
    model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    places = {"tasks": tasks, "broken": tmp_path / "broken", "empty": tmp_path / "empty"}
    for name in ("broken", "empty"):
        places[name].mkdir()
    text = (tasks / "capital.yaml").read_text().replace("tiny_capital", "broken").replace("rows.jsonl", "absent.jsonl")
    (tmp_path / "broken" / "broken.yaml").write_text(text)
    unsafe = (tasks / "capital.yaml").read_text().replace("tiny_capital", "unsafe") + "unsafe_code: true\n"
    (tmp_path / "broken" / "unsafe.yaml").write_text(unsafe)
    capsys.readouterr()
    assert run(["evaluate", str(model), *(option.format(**places) for option in options)]) == USAGE
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert "Traceback" not in error


def test_without_the_harness_one_line_says_what_to_install(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "ridgeline.trainer.harness"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    capsys.readouterr()
    assert run(["evaluate", str(model), "--tasks", "x"]) == USAGE
    assert "pip install 'ridgeline[eval]'" in capsys.readouterr().err
