"""Greedy generation with the cache equals transformers' generate: tokens of every family, and text whatever the tokenizer and its BOS."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from flax import nnx
from tokenizers import decoders, pre_tokenizers, processors

import ridgeline
from ridgeline.cli.commands.convert import from_hf, to_hf
from ridgeline.configs.errors import UserError
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.rows import RowSource
from ridgeline.loaders.tokenizers import load_tokenizer
from ridgeline.models.generate import Sampling, generate
from ridgeline.trainer.pretrained import merged_tokenizer
from tests.parity.hugging_face import VARIANTS, load_ours, random_tokens, save_random_model
from tests.sampling import drawn

pytestmark = pytest.mark.parity
PROMPTS = ["def f(x):", "The quick", "a"]
TOKENS = 8


FAMILIES = (
    *("gpt2", "llama3", "mistral", "olmo2", "olmo3", "gemma2", "gemma3", "phi3", "glm4", "qwen2-window", "qwen3"),
    *("mixtral", "gpt-oss", "llama4", "qwen3-moe", "deepseek-v2", "deepseek-v3"),
)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", drawn(FAMILIES, 8))
def test_greedy_generation_agrees(name, tmp_path):
    """Prompts of different lengths, together here and one at a time there; prompts and texts are longer than the window."""
    theirs = save_random_model(VARIANTS[name], tmp_path)
    _, graphdef, params = load_ours(tmp_path)
    prompts = [random_tokens((1, length), seed=length) for length in (9, 4, 14)]
    expected = [
        theirs.generate(torch.from_numpy(prompt).long(), do_sample=False, max_new_tokens=12, pad_token_id=0)[0, prompt.shape[1] :].tolist()
        for prompt in prompts
    ]
    decoder = nnx.merge(graphdef, params)
    ours = generate(decoder, [prompt[0].tolist() for prompt in prompts], max_tokens=12, sampling=Sampling(temperature=0))
    assert [result.tokens for result in ours] == expected


def byte_level(special: list[str], post_processor: Any = None) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    if post_processor is not None:
        made.post_processor = post_processor
    return made


def template(bos: str) -> Any:
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 0)])


def sentencepiece_model() -> bytes:
    import sentencepiece

    buffer = io.BytesIO()
    lines = iter(Path(__file__).read_text().splitlines())
    exact = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=buffer, vocab_size=290, model_type="bpe", **exact)
    return buffer.getvalue()


TOKENIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama3": (
        lambda: byte_level(["<s>", "</s>"], processors.Sequence([processors.ByteLevel(), template("<s>")])),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gpt2": (
        lambda: byte_level(["<|endoftext|>"], processors.ByteLevel()),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "qwen": (
        lambda: byte_level(["<|endoftext|>", "<|im_end|>"], processors.ByteLevel()),
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
    ),
    "bloom": (  # a BOS that is not put before texts
        lambda: byte_level(["<s>", "</s>"]),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "sentencepiece": (
        sentencepiece_model,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    ),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory per tokenizer, all with the same random weights."""
    root = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(  # an odd width: one device, and a short compile
        vocab_size=290,
        hidden_size=31,
        head_dim=8,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=289,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    directories = {}
    for name, (make, settings) in TOKENIZERS.items():
        directories[name] = shutil.copytree(root / "model", root / name)
        made = make()
        if isinstance(made, bytes):
            (root / name / "tokenizer.model").write_bytes(made)
        else:
            made.save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(
            json.dumps({**settings, "chat_template": "{{ messages }}", "pad_token": settings["eos_token"]})
        )
    return directories


def theirs(directory: Path) -> list[str]:
    """Greedy text of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[0, inputs.input_ids.shape[1] :]
        texts.append(tokenizer.decode(made, skip_special_tokens=True))
    return texts


def ours(directory: Path) -> list[str]:
    return [made.text for made in ridgeline.generate(directory, PROMPTS, temperature=0, max_tokens=TOKENS)]


def convert(command: Any, *arguments: Any) -> None:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_directory_its_import_and_its_export_continue_alike(originals: dict[str, Path], tmp_path: Path, name: str) -> None:
    original = originals[name]
    expected = theirs(original)
    assert ours(original) == expected
    convert(from_hf, original, "--output", tmp_path / "run")
    assert ours(tmp_path / "run") == expected
    convert(to_hf, tmp_path / "run", tmp_path / "export")
    assert theirs(tmp_path / "export") == expected
    assert ours(tmp_path / "export") == expected
    assert load_tokenizer(tmp_path / "export").sha256 == load_tokenizer(original).sha256
    kept = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert (kept["chat_template"], kept["pad_token"]) == ("{{ messages }}", kept["eos_token"])


@pytest.mark.parametrize(
    ("name", "add_bos"), [("llama3", False), ("gpt2", True), ("gpt2", None), ("bloom", True), ("sentencepiece", False)]
)
def test_a_run_keeps_the_rule_of_its_documents(originals: dict[str, Path], tmp_path: Path, name: str, add_bos: bool | None) -> None:
    """The documents of a corpus begin by the rule; the run that trains on it, and its export, continue prompts by the same one."""
    original = originals[name]
    (tmp_path / "text.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    prepare(PrepareSettings((tmp_path / "text.jsonl",), tmp_path / "corpus", str(original), add_bos=add_bos), workers=1)
    source = RowSource(tmp_path / "corpus", 4)
    rule, tokenizer = source.manifest.tokenizer.add_bos, load_tokenizer(original)
    assert rule == (tokenizer.add_bos if add_bos is None else add_bos)
    assert (source.reader.read([0], 1).ids[0, 0] == tokenizer.bos_id) == rule
    assert load_tokenizer(tmp_path / "corpus" / "tokenizer").sha256 == tokenizer.sha256 == source.manifest.tokenizer.sha256

    (tmp_path / "start").mkdir()
    merged, notes = merged_tokenizer(tmp_path / "start", tmp_path / "corpus" / "tokenizer", rule, original)
    tuned = shutil.copytree(original, tmp_path / "tuned")  # the run as it would be saved: these weights, and its tokenizer
    shutil.copytree(merged, tuned, dirs_exist_ok=True)
    convert(from_hf, tuned, "--output", tmp_path / "run")
    assert len(notes) == (rule != tokenizer.add_bos)
    assert load_tokenizer(tmp_path / "run" / "tokenizer").add_bos == rule
    texts = ours(tmp_path / "run")
    assert (texts == ours(original)) == (rule == tokenizer.add_bos)
    convert(to_hf, tmp_path / "run", tmp_path / "export")
    assert theirs(tmp_path / "export") == ours(tmp_path / "export") == texts
    assert load_tokenizer(tmp_path / "export").sha256 == tokenizer.sha256


def test_a_post_processor_with_several_leading_tokens_is_refused(tmp_path: Path) -> None:
    several = processors.TemplateProcessing(single="<s> </s> $A", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)])
    byte_level(["<s>", "</s>"], several).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="puts 2 tokens before a text"):
        load_tokenizer(tmp_path)
