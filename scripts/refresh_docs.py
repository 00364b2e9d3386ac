"""The commands shown in README and docs: read, run and compared with what they print.

    python scripts/refresh_docs.py [PAGE...]     run every block and write what it prints today back into the pages

tests/docs runs the same blocks in CI. A block is a `console` fence. Its lines beginning with `$ ` are commands (`\\` continues one); the
lines after a command are what it prints, where `...` stands for any lines. A command without output only has to succeed; one whose output
begins with `ridge: error` has to fail. The title of the fence, visible on the site, sets how the block is treated:

    (none)                   the output is compared letter by letter
    title="numbers vary"     numbers, durations and the width of columns may differ
    title="not run: REASON"  not run, and why

A fence of another language whose title is a file name (`yaml title="mysite.yaml"`) is written to that file before the next commands run.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.launch.cuda_plugin import has_nvidia_hardware

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.name != "LOG.md")]
"""Pages in the order in which their blocks run. All of them use the run of `make quickstart`."""
FENCE = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
ANY = "..."
NOISE = re.compile(r"^(WARNING: All log messages before|[IWE]\d{4} [\d:.]+ +\d+ |[IWE]\d{4} \d\d:)")
"""Lines that C++ libraries print before JAX has set up its logging."""
READER_HAS_NOT = ("XLA_FLAGS", "JAX_PLATFORMS", "RIDGE_CLUSTERS", "MAKEFLAGS")
"""Variables that the tests set."""
NUMBER = re.compile(
    r"n/a|\d+h\d\dm|\d+m\d\ds|[-+]?(?<![A-Za-z_])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:[kMGTP](?![A-Za-z]))?(?: ?(?:ms|us|s|h|m)\b|%)?"
)


@dataclass
class Command:
    """One command and what the page shows of its output."""

    text: str
    expected: list[str] = field(default_factory=list)


@dataclass
class Block:
    """One fence of a page."""

    page: str
    line: int
    language: str
    title: str
    body: str

    @property
    def name(self) -> str:
        """Page and line, as in README.md:40."""
        return f"{self.page}:{self.line}"

    @property
    def reason_not_run(self) -> str | None:
        """Why the block is not run, or None."""
        return self.title.removeprefix("not run: ") if self.title.startswith("not run: ") else None

    @property
    def numbers_vary(self) -> bool:
        """Whether numbers may differ."""
        return self.title == "numbers vary"

    @property
    def file(self) -> str | None:
        """Name of the file that the block is, or None."""
        return self.title if self.language != "console" and re.fullmatch(r"[\w./-]+\.\w+", self.title) else None

    def commands(self) -> list[Command]:
        """Split the body into commands and their outputs."""
        found: list[Command] = []
        continued = False
        for line in self.body.splitlines():
            if continued:
                found[-1].text += "\n" + line
            elif line.startswith("$ "):
                found.append(Command(line[2:]))
            elif found:
                found[-1].expected.append(line)
            else:
                raise ValueError(f"{self.name}: output before the first command: {line!r}")
            continued = (continued or line.startswith("$ ")) and line.endswith("\\")
        return found


def blocks(page: str) -> list[Block]:
    """Return the fences of a page, top to bottom."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["title"] or "", found["body"])
        for found in FENCE.finditer(text)
    ]


# Comparing.


def pattern(line: str) -> str:
    """Return a line without what varies: numbers with their units, runs of spaces, bars."""
    line = NUMBER.sub("#", line)
    return re.sub(r"\s+", " ", re.sub(r"[#=-]{2,}", "#", line)).strip()


def difference(expected: list[str], printed: list[str], *, numbers_vary: bool) -> str | None:
    """Return what the page shows and the command did not print, or None."""
    same = (lambda line: pattern(line)) if numbers_vary else (lambda line: line.rstrip())
    position, anywhere = 0, False
    for number, line in enumerate(expected):
        if line.strip() == ANY:
            anywhere = True
            continue
        rest = [same(other) for other in printed[position:]]
        if same(line) not in (rest if anywhere else rest[:1]):
            got = rest[0] if rest else "(nothing)"
            return f"line {number + 1} shows {line!r}; printed: {got!r}"
        position += rest.index(same(line)) + 1
        anywhere = False
    if not anywhere and position < len(printed):
        return f"not shown: {printed[position]!r}"
    return None


def renewed(expected: list[str], printed: list[str], *, numbers_vary: bool = False) -> tuple[list[str], list[str]]:
    """Return the output to show today, and the shown lines for which none was found.

    Parts left out (`...`) stay left out. Where numbers vary, a line with the same words stays as it is: the short run of the tests is not
    what a page should show.
    """
    if numbers_vary and difference(expected, printed, numbers_vary=True) is None:
        return expected, []
    if not any(line.strip() == ANY for line in expected):
        return list(printed), []
    shown, lost, position = [], [], 0
    for line in expected:
        if line.strip() == ANY:
            shown.append(line)
            continue
        wanted = pattern(line)
        rest = [pattern(other) for other in printed[position:]]
        close = [wanted] if wanted in rest else difflib.get_close_matches(wanted, rest, n=1, cutoff=0.6)
        if not close:
            lost.append(line)
            continue
        position += rest.index(close[0]) + 1
        shown.append(line if close[0] == wanted and numbers_vary else printed[position - 1])
    return shown, lost


# Running.


class Workspace:
    """A directory that looks like a clone after `make install`, in which quickstart and examples are short: fewer texts, fewer steps."""

    SHORT = (
        ("\n  steps: 600", "\n  steps: 12"),
        ("warmup_steps: 20", "warmup_steps: 4"),
        ("log_every: 20", "log_every: 2"),
        ("every: 200", "every: 6"),
        ("max_batches: 16", "max_batches: 2"),
        ("batch_size: 8", "batch_size: 2"),
    )
    SHORT_EXAMPLES = {
        r"^  steps: \d+": "  steps: 18",
        r"every: \d+": "every: 9",
        r"warmup_steps: [1-9]\d*": "warmup_steps: 4",
        r"{step: (\d+)0,": r"{step: \1,",
        r"^  batch_size: \d+": "  batch_size: 2",
        r"max_batches: \d+": "max_batches: 2",
    }
    """Pattern -> replacement in configs/examples/*-tiny*.yaml; not in what they are based on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock", "README.md")
        for name in (*files, "scripts", "benchmarks", "examples", "docs"):
            (root / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "configs", root / "configs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        quickstart = root / "configs/quickstart.yaml"
        text = quickstart.read_text()
        for long, short in self.SHORT:
            assert long in text, f"configs/quickstart.yaml has no '{long}' to shorten"
            text = text.replace(long, short)
        quickstart.write_text(text)
        for example in (root / "configs/examples").glob("*-tiny*.yaml"):
            text = example.read_text()
            for long, short in self.SHORT_EXAMPLES.items():
                text = re.sub(long, short, text, flags=re.MULTILINE)
            if "base: [examples/" in text:  # the installed one, which is not short
                text += "schedule:\n  warmup_steps: 4\ndata:\n  batch_size: 2\n"
            example.write_text(text)
        texts = root / "texts"
        texts.mkdir()
        for path in sorted(Path(os.__file__).parent.glob("*.py"))[::8]:
            shutil.copy(path, texts)
        binaries = root / ".venv/bin"
        binaries.mkdir(parents=True)
        for name, module in (("python", ""), ("ridge", "-m ridgeline")):
            script = binaries / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            script.chmod(0o755)
        (binaries.parent / ".installed").touch()
        self.environment = {name: value for name, value in os.environ.items() if name not in READER_HAS_NOT}
        (root / ".clusters").mkdir()
        for name in ("dgx-h100", "mn5-acc"):  # in a temporary directory: as if all nodes saw it
            (root / f".clusters/{name}.yaml").write_text(f"base: [clusters/{name}]\nslurm: {{single_machine: true}}\n")
        self.environment |= {
            "RIDGE_CLUSTERS": str(root / ".clusters"),
            "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TEXTS": str(texts),
            "PYTHONWARNINGS": "ignore",
            "TERM": "dumb",
            "COLUMNS": "140",
            "HOME": str(root),
        }
        if has_nvidia_hardware():  # on other machines it is unset, as for a reader
            self.environment["JAX_PLATFORMS"] = "cpu"
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_"))]:
            del self.environment[name]
        self._quickstart: tuple[int, list[str]] | None = None

    def quickstart(self) -> tuple[int, list[str]]:
        """Make the run that all pages use, once; return its exit code and output."""
        if self._quickstart is None:
            self._quickstart = self._run("make quickstart", 500)
        return self._quickstart

    def run(self, command: str, limit_s: float = 300) -> tuple[int, list[str]]:
        """Run a command in bash and return its exit code and what it printed, without the noise of libraries."""
        return self.quickstart() if command.partition("#")[0].strip() == "make quickstart" else self._run(command, limit_s)

    def _run(self, command: str, limit_s: float) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
        return done.returncode, [line.rstrip() for line in done.stdout.splitlines() if not NOISE.match(line)]

    def play(self, block: Block) -> list[tuple[Command, int, list[str]]]:
        """Write the file of a block, or run its commands; return each with exit code and output. A failure ends the block."""
        if block.file is not None:
            path = self.root / block.file
            if path.name not in ("job.sh",):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body, encoding="utf-8")
            return []
        played: list[tuple[Command, int, list[str]]] = []
        for command in block.commands():
            code, printed = self.run(command.text)
            played.append((command, code, printed))
            if (code != 0) != expects_failure(command):
                break
        return played


def expects_failure(command: Command) -> bool:
    """Whether the page shows an error of the command."""
    return any(line.startswith("ridge: error") for line in command.expected)


def trimmed(lines: list[str]) -> list[str]:
    """Leave out empty lines at both ends."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    while lines and not lines[0]:
        lines = lines[1:]
    return lines


def refresh(pages: list[str]) -> int:
    """Run all blocks and write today's outputs into the named pages. Returns the number of things that need a person."""
    problems = 0
    with tempfile.TemporaryDirectory() as directory:
        workspace = Workspace(Path(directory))
        for page in PAGES:
            if page not in pages:
                continue
            if "quickstart" in "".join(block.body for block in blocks(page)):
                workspace.quickstart()
            text = (ROOT / page).read_text(encoding="utf-8")
            for block in blocks(page):
                if block.file is None and (block.language != "console" or block.reason_not_run is not None):
                    continue
                body = ""
                for command, code, printed in workspace.play(block):
                    if (code != 0) != expects_failure(command):
                        print(f"{block.name}: exit code {code}: {command.text}\n  " + "\n  ".join(printed[-8:]))
                        problems += 1
                    lines: list[str] = []
                    if command.expected:
                        lines, lost = renewed(trimmed(command.expected), trimmed(printed), numbers_vary=block.numbers_vary)
                        problems += len(lost)
                        for line in lost:
                            print(f"{block.name}: no longer printed, removed: {line!r}")
                    if command.expected and command.expected[-1] == "":
                        lines.append("")
                    body += f"$ {command.text}\n" + "".join(f"{line}\n" for line in lines)
                if body and body.count("\n$ ") == block.body.count("\n$ "):
                    text = text.replace(block.body, body, 1)
            (ROOT / page).write_text(text, encoding="utf-8")
    return problems


if __name__ == "__main__":
    sys.exit(1 if refresh(sys.argv[1:] or PAGES) else 0)
