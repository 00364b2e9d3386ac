"""`ridge data prepare` and `ridge data train-tokenizer` as a user meets them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli import main as cli

COMMAND = [sys.executable, "-m", "ridgeline", "data"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of sixty small source files, one of them not UTF-8."""
    monkeypatch.chdir(tmp_path)
    Path("src/pkg").mkdir(parents=True)
    for index in range(60):
        Path(f"src/pkg/m{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 20)
    Path("src/bad.py").write_bytes(b"\xff")
    Path("src/notes.txt").write_text("not code")
    return Path("src")


READ = ["--input", "src", "--include", "**/*.py", "--holdout", "validation=0.2"]


def test_from_source_files_to_a_corpus(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["data", "train-tokenizer", *READ, "--vocab-size", "280", "--output", "t/tokenizer.json"]) == 0
    assert "t/tokenizer.json: 280 tokens from " in capfd.readouterr().out
    prepare = ["data", "prepare", *READ, "--tokenizer", "t/tokenizer.json", "--output", "corpus", "--gzip-baseline"]
    assert cli.run(prepare) == 0
    out, err = capfd.readouterr()
    assert "1 bad records skipped:\n  src/bad.py: invalid UTF-8 at byte 0\n" in err
    assert re.search(r"set +shards +documents +tokens +text bytes +bytes/token +gzip -9 bits/byte +path\ntrain +1 +\d+ ", out)
    assert re.search(r"\nvalidation +1 +\d+ .* corpus/validation\ncorpus: prepared in ", out)
    assert cli.run(prepare) == 0
    assert "corpus: already prepared with these settings" in capfd.readouterr().out
    assert cli.run([*prepare, "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert summary["already_done"] is True
    assert sum(part["documents"] for part in summary["sets"]) == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none", "--tokenizer", "bytes"], "input not found: none"),
        (["--input", "src", "--tokenizer", "bite"], "tokenizer not found: bite; did you mean 'bytes'?"),
        (["--input", "src", "--tokenizer", "bytes", "--format", "jsonll"], "unknown format 'jsonll'; did you mean 'jsonl'?"),
        (["--input", "src", "--tokenizer", "bytes", "--slice", "1of2"], "--slice '1of2'"),
        (["--input", "src", "--tokenizer", "bytes", "--holdout", "v=2"], "holdout 'v=2'"),
        (
            ["--input", "src", "--tokenizer", "bytes", "--max-bad", "0"],
            "more than 0 bad records (--max-bad); the last: src/bad.py: invalid",
        ),
        (["--input", "src", "--tokenizer", "bytes", "--workers", "x"], "'x' is not a valid integer"),
        (["--tokenizer", "bytes"], "missing option"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(tree: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.run(["data", "prepare", *arguments, "--output", "out"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_slices_say_what_comes_next(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare = ["data", "prepare", *READ, "--tokenizer", "bytes", "--output", "out", "--shards", "4"]
    for index in range(2):
        assert cli.run([*prepare, "--slice", f"{index}/2"]) == 0
        assert f"slice {index}/2: 2 shards made, 0 kept; " in capfd.readouterr().out
    assert cli.run(prepare) == 0
    assert "(4 shards kept" in capfd.readouterr().out


def test_ctrl_c_on_a_terminal_shows_how_to_continue(tmp_path: Path) -> None:
    line = json.dumps({"text": "word " * 2000}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 3000)
    command = [*COMMAND, "prepare", "--input", "a.jsonl", "--tokenizer", "bytes", "--output", "out", "--workers", "1"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=tmp_path, stderr=theirs, stdout=theirs, start_new_session=True)
    os.close(theirs)
    shown = ""
    while "tokens" not in shown:
        shown += os.read(ours, 4096).decode()
    assert "tokenizing" in shown, "a progress bar"
    os.killpg(process.pid, signal.SIGINT)
    shown += read_all(ours)
    assert process.wait(timeout=60) == 130
    assert "stopped; finished shards are kept" in shown
    assert "Traceback" not in shown
    assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.count("out: prepared in") == 1


def read_all(terminal: int) -> str:
    text = b""
    while True:
        try:
            block = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        text += block
    os.close(terminal)
    return text.decode()
