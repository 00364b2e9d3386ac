"""Hostile Hugging Face directories: every damage is one clear line, within bounded memory and time, in one child process."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from tests.models.test_convert import LLAMA, write_hf

SEED, CASES = 12, 96
EXTRA_BYTES = 1 << 30
"""Memory of a case, in addition to the process itself: the model has 60 kB."""
CASE_S = 10.0
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**40,
    1e308,
    "x",
    "x" * 10_000,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    float("nan"),
    float("inf"),
]


def place(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a container in a JSON tree and one of its keys."""
    while True:
        key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.7:
            tree = tree[key]
            continue
        return tree, key


def mutate_json(path: Path, rng: random.Random, at: Any = None) -> None:
    content = json.loads(path.read_text())
    for _ in range(rng.randint(1, 2)):
        tree, key = place(content, rng)
        if rng.random() < 0.2:
            del tree[key]
        else:
            tree[key] = rng.choice(ODD)
        if not content:
            break
    path.write_text(json.dumps(content))


def mutate_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        data[:8] = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(data)]).to_bytes(8, "little")
    else:
        data += rng.randbytes(100)
    path.write_bytes(data)


def mutate_header(path: Path, rng: random.Random) -> None:
    """Change entries of the safetensors header; its length is kept right."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.sample(names, 2)
    kind = rng.randrange(5)
    if kind == 0:
        header[one][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(ODD)
    elif kind == 1:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif kind == 2:
        header[one]["shape"] = [rng.choice([0, -1, 2**40, 2**63, 1.5, True]) for _ in range(rng.randint(0, 40))]
    elif kind == 3:
        header[one]["data_offsets"] = [rng.choice([-8, 0, 2**62, len(data)]) for _ in range(rng.randint(1, 3))]
    else:
        header[rng.choice(ODD[10:12])] = header.pop(one)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def special(directory: Path, rng: random.Random) -> None:
    """What no byte of a file can be: links, FIFOs, devices, directories, huge and deeply nested files, weights that are no numbers."""
    name = rng.choice(["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"])
    path = directory / name
    kind = rng.randrange(8)
    content = path.read_bytes()
    path.unlink()
    if kind == 0:
        path.symlink_to("/etc/hostname")
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.mkdir()
    elif kind == 5:
        path.write_text(rng.choice(["[", '{"a":']) * 200_000)
    elif kind == 6:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_text('{"a":[' + "[]," * 5_000_000 + "[]]}" if name != "model.safetensors" else "")
        if name == "model.safetensors":
            weights = bytearray(content)
            weights[-4:] = rng.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f"])
            path.write_bytes(weights)


def index(directory: Path, rng: random.Random) -> None:
    files = ["model.safetensors", "../x", "", ".", "..", "a\0b", "x" * 5000, 3, None, ["a"]]
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": rng.choice(files), "lm_head.weight": files[0]}})
    )


MUTATIONS: list[tuple[str, Callable[[Path, random.Random], None]]] = [
    ("config", lambda d, rng: mutate_json(d / "config.json", rng)),
    ("tokenizer", lambda d, rng: mutate_json(d / "tokenizer.json", rng)),
    ("tokenizer_config", lambda d, rng: mutate_json(d / "tokenizer_config.json", rng)),
    ("generation_config", lambda d, rng: mutate_json(d / "generation_config.json", rng)),
    ("header", lambda d, rng: mutate_header(d / "model.safetensors", rng)),
    ("bytes", lambda d, rng: mutate_bytes(d / rng.choice(["config.json", "tokenizer.json", "model.safetensors"]), rng)),
    ("special", special),
    ("index", index),
]


def read_everything(directory: Path, copy: Path) -> None:
    """What import, evaluation, generation and init_from read of a directory."""
    import numpy as np

    from ridgeline.loaders.hf_files import copy_tokenizer
    from ridgeline.trainer.pretrained import LoadedModel, open_source

    source = open_source(directory)
    checkpoint = source.hf
    assert checkpoint is not None
    for path, shape in checkpoint.shapes.items():
        for layer in range(shape[0]) if path.startswith("blocks.") else (None,):
            checkpoint.read_layer(path, layer, np.dtype(np.float32))
    copy_tokenizer(directory, copy, checkpoint.config)
    if source.tokenizer is not None:
        LoadedModel(source, source.config, None, None, None, None).eos_ids  # type: ignore[arg-type]  # noqa: B018
        source.tokenizer.write_rule(copy)
        source.tokenizer.decode(source.tokenizer.encode_batch(["a b"])[0])


def run_cases(good: str, work: str, results: Any) -> None:
    read_everything(Path(good), Path(work) / "first")  # libraries are loaded before the limit
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, used + EXTRA_BYTES))
    failures, refused = [], 0
    for number in range(CASES):
        rng = random.Random(f"{SEED}/{number}")
        name, mutation = MUTATIONS[number % len(MUTATIONS)]
        directory, copy = Path(work) / "case", Path(work) / "copy"
        shutil.copytree(good, directory)
        mutation(directory, rng)
        began = time.monotonic()
        try:
            read_everything(directory, copy)
        except UserError as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 2000:
                failures.append((number, name, f"a long message: {str(error)[:300]!r}"))
        except BaseException as error:
            failures.append((number, name, f"{type(error).__name__}: {str(error)[:300]}"))
        if time.monotonic() - began > CASE_S:
            failures.append((number, name, f"took {time.monotonic() - began:.1f} s"))
        shutil.rmtree(directory)
        shutil.rmtree(copy, ignore_errors=True)
    results.put((failures, refused))


def write_good(directory: Path) -> Path:
    import tokenizers

    write_hf(directory, LLAMA.model_copy(update={"vocab_size": 300}))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "<s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["</s>", "<s>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "pad_token_id": 0}))
    return directory


def test_mutations_of_a_directory_are_one_clear_line_each(tmp_path: Path) -> None:
    good = write_good(tmp_path / "good")
    context = multiprocessing.get_context("spawn")  # a fork of a process in which JAX has threads can hang
    results = context.Queue()
    child = context.Process(target=run_cases, args=(str(good), str(tmp_path), results))
    child.start()
    try:
        failures, refused = results.get(timeout=300)
    finally:
        child.kill()
        child.join()
    assert not failures
    assert CASES / 2 < refused < CASES


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, stored: str, value: float) -> None:
    import ml_dtypes
    import numpy as np

    from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf
    from tests.models.test_convert import random_values

    values = random_values(LLAMA)
    values["blocks.mlp.up"][1, 3, 4] = value
    export_weights(LLAMA, lambda path, layer: values[path] if layer is None else values[path][layer], tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(LLAMA, stored, {})))
    checkpoint = open_hf(tmp_path)
    checkpoint.read_layer("blocks.mlp.up", 0, np.dtype(ml_dtypes.bfloat16))
    with pytest.raises(UserError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has weights that are NaN or infinite"):
        checkpoint.read_layer("blocks.mlp.up", 1, np.dtype(ml_dtypes.bfloat16))


def test_files_in_the_hugging_face_cache_are_links_to_blobs(tmp_path: Path) -> None:
    from ridgeline.loaders.tokenizers import load_tokenizer

    good = write_good(tmp_path / "good")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(good.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    read_everything(snapshot, tmp_path / "copy")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "good" / "tokenizer.json")
    with pytest.raises(UserError, match="outside its directory"):
        load_tokenizer(snapshot)
