"""Plug-ins: the example package is installed, planned, trained and resumed; failures name the package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline import PACKAGE
from ridgeline.configs import plugins
from ridgeline.configs.choices import allowed_names
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.compose import family_names
from ridgeline.configs.errors import UserError
from ridgeline.configs.json_schema import json_schema
from ridgeline.configs.load import load
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.tokenizers import ByteTokenizer, load_tokenizer
from tests.xla_flags import QUICK_XLA

ROOT = PACKAGE.parent
SETTINGS = [
    *("model.family=parallel", "optimizer.kind=signum", "schedule.kind=inverse_sqrt"),
    *('logging.metrics=["train/bits"]', "logging.writers=[csv]", "logging.tensorboard=false"),
    *("model.vocab_size=258", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2", "model.num_kv_heads=null"),
    *("model.mlp_dim=32", "model.max_seq_len=32", "data.seq_len=32", "data.batch_size=8", "schedule.warmup_steps=0"),
    *("trainer.log_every=1", "evaluation.every=0", "evaluation.sets={}", "checkpoint.every=2"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with the example package, built from a copy: building leaves files behind."""
    directory = tmp_path_factory.mktemp("plugins")
    shutil.copytree(ROOT / "examples/ridgeline_example", directory / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", directory / "site", directory / "source"], check=True, timeout=300)
    return directory / "site"


@pytest.fixture(scope="module")
def ridge(site: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `ridge` in a process that sees the package."""

    def run(*arguments: str | Path, code: str = "from ridgeline.cli.main import main; main()") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "XLA_FLAGS": QUICK_XLA}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("data")
    (directory / "text.txt").write_text("A package adds what this repository does not have. " * 200)
    prepare(PrepareSettings((directory / "text.txt",), directory / "corpus", "bytes"), workers=1)
    return [*SETTINGS, f"data.train=[{{path: {directory / 'corpus'}}}]", f"run_dir={directory / 'run'}"]


def test_the_example_is_trained_and_resumed(ridge: Callable[..., Any], settings: list[str]) -> None:
    run_dir = Path(settings[-1].partition("=")[2])
    for steps in (2, 4):
        done = ridge("train", "quickstart", *settings, f"trainer.steps={steps}", "schedule.kind=inverse_sqrt")
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from the checkpoint of step 2" in done.stdout + done.stderr
    lines = [line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "train/loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["train/bits"] == pytest.approx(line["train/loss"] * 1.4426950408889634) for line in lines)
    assert (run_dir / "loss.csv").read_text().startswith("1,")
    changed = ridge("train", "quickstart", *settings, "trainer.steps=6", "optimizer.kind=sgd")
    assert changed.returncode == 2, "the optimizer state of another kind does not fit"
    assert "optimizer.kind" in changed.stderr


def test_the_example_is_planned_without_jax(ridge: Callable[..., Any], settings: list[str]) -> None:
    check = "import sys, ridgeline.cli.main as c; code = c.run(sys.argv[1:]); assert 'jax' not in sys.modules; sys.exit(code)"
    done = ridge("plan", "quickstart", *settings, "--cluster", "example-lab", "--json", code=check)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["candidates"][0]["memory_components"]["moments"] > 0
    code = (
        "import sys; from ridgeline.configs.load import load; from ridgeline.planner.local import LocalSizes;"
        "from ridgeline.planner.optimizer_state import optimizer_state;"
        "one = LocalSizes(load('quickstart', sys.argv[1:]).config, 1, 1, 1); print(optimizer_state(one)[0] / one.parameters)"
    )
    for moments, size in (("float32", 4), ("bfloat16", 2)):
        assert float(ridge(*settings, f"precision.moments={moments}", code=code).stdout) == size


def test_the_example_prepares_a_format_of_its_own(ridge: Callable[..., Any], tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "notes.para").write_text("one paragraph\nof two lines\n\nanother\n\n\n")
    done = ridge("data", "prepare", "--input", texts, "--output", tmp_path / "corpus", "--tokenizer", "bytes", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "corpus/manifest.json").read_text())
    assert manifest["counts"]["documents"] == 2
    assert manifest["counts"]["text_bytes"] == len("one paragraph\nof two lines" + "another")
    wrong = ridge("data", "prepare", "--input", texts, "--output", tmp_path / "b", "--tokenizer", "bytes", "--format", "paragraph")
    assert wrong.returncode == 2
    assert "did you mean 'paragraphs'" in wrong.stderr


def test_errors_and_schema_list_the_names(ridge: Callable[..., Any], settings: list[str]) -> None:
    done = ridge("config", "show", "quickstart", *settings, "optimizer.kind=signun")
    assert done.returncode == 2
    assert "did you mean 'signum'" in done.stderr
    assert re.search(r"allowed: .*\badamw\b.*\bsignum\b", done.stderr)
    schema = ridge("config", "schema")
    assert all(f'"{name}"' in schema.stdout for name in ("parallel", "signum", "inverse_sqrt"))


def test_jobs_see_the_packages_of_the_interpreter() -> None:
    """The job script adds the code to PYTHONPATH, and passes no option that hides site-packages."""
    scripts = [*(ROOT / "launch/slurm").rglob("*.sh"), *(ROOT / "tests/launch/golden").rglob("*")]
    texts = [path.read_text() for path in scripts if path.is_file()]
    assert any("PYTHONPATH" in text for text in texts)
    for text in texts:
        assert not re.search(r"PYTHONNOUSERSITE|python\S* (-\w*[IsSE])\b", text)


# Failures.


def forget() -> None:
    plugins._installed.cache_clear()
    plugins._registered.cache_clear()


class Fake:
    """Entry points that no package has; `register` adds one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.entries: list[importlib.metadata.EntryPoint] = []
        self.directory = directory
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda: importlib.metadata.EntryPoints(self.entries))
        monkeypatch.syspath_prepend(directory)
        forget()

    def register(self, group: str, name: str, value: str, package: str = "some-package") -> None:
        info = self.directory / f"{package}-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        entry = importlib.metadata.EntryPoint(name, value, f"ridgeline.{group}")
        vars(entry)["dist"] = importlib.metadata.PathDistribution(info)
        self.entries.append(entry)
        forget()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    yield Fake(monkeypatch, tmp_path)
    forget()


def test_names_are_listed_without_an_import(fake: Fake) -> None:
    fake.register("optimizers", "mine", "no_such_module:RULE")
    fake.register("families", "ours", "no_such_module:FAMILY")
    assert "mine" in allowed_names("optimizer.kind")
    assert "ours" in family_names()
    assert "mine" in json_schema()["$defs"]["OptimizerConfig"]["properties"]["kind"]["enum"]


def test_a_plugin_that_cannot_be_imported_names_its_package(fake: Fake) -> None:
    (fake.directory / "broken_plugin.py").write_text("raise RuntimeError('two\\nlines')\n")
    fake.register("optimizers", "mine", "broken_plugin:RULE")
    with pytest.raises(UserError) as error:
        plugins.load("optimizers", "mine", object)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in ("mine", "some-package", "RuntimeError", "broken_plugin:RULE"))


def test_a_plugin_of_another_type_names_its_package(fake: Fake) -> None:
    fake.register("optimizers", "mine", "json:dumps")
    with pytest.raises(UserError, match=r"some-package must be a int, got function"):
        plugins.load("optimizers", "mine", int)
    fake.register("schedules", "flat", "json:__name__")
    with pytest.raises(UserError, match="must be a function or class"):
        plugins.load_callable("schedules", "flat")


def test_two_packages_with_one_name_are_both_named_when_it_is_used(fake: Fake) -> None:
    fake.register("schedules", "mine", "json:dumps", "one")
    fake.register("schedules", "mine", "json:dumps", "two")
    assert plugins.names("schedules") == ["mine"]
    with pytest.raises(UserError, match="one and two"):
        plugins.load_callable("schedules", "mine")


def test_a_built_in_name_is_refused(fake: Fake) -> None:
    fake.register("families", "llama", "json:dumps", "shadow")
    fake.register("clusters", "dgx-h100", "json:dumps", "shadow")
    with pytest.raises(UserError, match="shadow"):
        load("models/llama-3.2-1b")
    with pytest.raises(UserError, match="shadow"):
        load_cluster("dgx-h100")
    fake.entries.clear()
    fake.register("optimizers", "sgd", "json:dumps", "shadow")
    with pytest.raises(UserError, match=r"optimizer\.kind: .*shadow"):
        load("quickstart", ["optimizer.kind=sgd"])
    fake.register("tokenizers", "huggingface", "json:dumps", "shadow")
    with pytest.raises(UserError, match="shadow"):
        load_tokenizer(fake.directory, "huggingface")


def test_a_family_without_defaults_names_the_missing_file(fake: Fake) -> None:
    (fake.directory / "bare_family.py").write_text("raise RuntimeError('imported')\n")
    fake.register("families", "bare", "bare_family:FAMILY")
    with pytest.raises(UserError, match=r"bare\.yaml"):
        load("quickstart", ["model.family=bare"])


def test_a_tokenizer_is_found_by_its_kind_and_by_its_file(fake: Fake, tmp_path: Path) -> None:
    (fake.directory / "upper_tokenizer.py").write_text(
        "from ridgeline.loaders.tokenizers import ByteTokenizer\n\n\n"
        "class Upper(ByteTokenizer):\n    kind = 'upper'\n    file_name = 'upper.txt'\n\n"
        "    def save_copy(self, directory):\n        directory.mkdir(exist_ok=True)\n"
        "        (directory / self.file_name).write_text('')\n        return directory / self.file_name\n"
    )
    fake.register("tokenizers", "upper", "upper_tokenizer:Upper")
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "upper.txt").write_text("")
    for kind in (None, "upper"):
        tokenizer = load_tokenizer(directory, kind)
        assert isinstance(tokenizer, ByteTokenizer)
        assert tokenizer.kind == "upper"
    tokenizer.add_bos = False  # recorded for a plug-in that knows nothing of it
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy", "upper").add_bos is False
    tokenizer.add_bos = True
    tokenizer.write_rule(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy", "upper").add_bos is True
    with pytest.raises(UserError, match=r"did you mean 'upper'"):
        load_tokenizer(directory, "uper")
