"""Commands of README and docs run, in order, and print what the page shows (scripts/refresh_docs.py has the conventions).

Those of README and of planning.md, whose output changes with every change of the planner, all run; of the other pages, each of which stands
alone, those drawn for the commit (`make test FULL=1`: all).
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from ridgeline.cli.main import ridge
from scripts.refresh_docs import PAGES, ROOT, Block, Workspace, blocks, difference, expects_failure, pattern, renewed, trimmed
from tests.sampling import drawn


def runs(block: Block) -> bool:
    """Whether it is written or run; the others state why they are not (test_no_command_hides_from_the_test)."""
    return (block.file is not None or block.language == "console") and block.reason_not_run is None


PLANNING = "docs/guides/planning.md"
DRAWN = [PAGES[0], PLANNING, *drawn([page for page in PAGES[1:] if page != PLANNING and any(map(runs, blocks(page)))], 2)]
BLOCKS = [block for page in DRAWN for block in blocks(page) if runs(block)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A clone with a short quickstart; README's first block makes its run."""
    made = Workspace(tmp_path_factory.mktemp("docs"))
    code, printed = made.quickstart()
    assert code == 0, "\n".join(printed[-20:])
    return made


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_commands_print_what_the_page_shows(block: Block, workspace: Workspace) -> None:
    for command, code, printed in workspace.play(block):
        shown = "\n".join(printed[-12:])
        assert (code != 0) == expects_failure(command), f"{command.text}\nexit code {code}\n{shown}"
        if expected := trimmed(command.expected):
            wrong = difference(expected, trimmed(printed), numbers_vary=block.numbers_vary)
            assert wrong is None, f"{block.name}: {command.text}: {wrong}\nrun: python scripts/refresh_docs.py {block.page}"


@pytest.mark.parametrize("page", PAGES)
def test_no_command_hides_from_the_test(page: str) -> None:
    """Commands stand in `console` fences, never in indented blocks or in other shell fences; titles follow the convention."""
    text = (ROOT / page).read_text()
    assert re.findall(r"^ {4,}\$? ?(?:ridge|make|pip|srun) .*", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M) == []
    for block in blocks(page):
        assert block.language not in ("sh", "shell", "bash") or block.file is not None, block.name
        if block.language == "console":
            assert block.title in ("", "numbers vary") or len(block.reason_not_run or "") > 5, block.name
    assert text.count("\n```") % 2 == 0, "a fence is not closed"


DETERMINISTIC = {"init", "plan", "compile", "shardings", "estimate", "config", "submit"}
"""Commands whose numbers depend on nothing but their arguments: a page shows them as they are today."""


@pytest.mark.parametrize("page", PAGES)
def test_numbers_vary_only_where_something_is_measured(page: str) -> None:
    """Otherwise a figure on the page could be stale."""
    for block in blocks(page):
        for command in block.commands() if block.numbers_vary else ():
            name = re.match(r"ridge (\S+)", command.text)
            stale = name is not None and name[1] in DETERMINISTIC and command.expected not in ([], ["..."])
            assert not stale, f"{block.name}: the output of {command.text} must be compared letter by letter: remove the title"


def command_at(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """Follow the names of commands, and return the command with the rest of the words."""
    command: click.Command = ridge
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return None, words
        command, words = found, words[1:]
    return command, words


def check_exists(code: str, where: str) -> None:
    """Refuse a command line with a command or an option that `ridge` does not have."""
    words = code.replace("\\\n", " ").split()
    for alternative in words[0].split("|"):
        command, rest = command_at([alternative, *words[1:]])
        assert command is not None, f"{where}: ridge {code}"
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
            "--help",
            "-h",
            "--version",
        }
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(rest)):
            assert option in known, f"{where}: ridge {code}: {option}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_in_the_prose_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for code in re.findall(r"`ridge ([a-z][^`]*)`", text):
        check_exists(code, page)


NOT_RUN = [block for page in PAGES for block in blocks(page) if block.language == "console" and block.reason_not_run is not None]


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.name)
def test_commands_that_are_not_run_exist(block: Block) -> None:
    for command in block.commands():
        for code in re.findall(r"\bridge ([a-z][^#]*)", command.text.partition("#")[0]):
            check_exists(code, block.name)


# The comparison itself.


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 20/600  loss 6.7519  6.91k tokens/s  step 296 ms", "step 4/24   loss 8.3198  grad 1.0  2.94k tokens/s"),
        ("productive  293.9  91.9%", "lost  293.9  91.9%"),
    ],
)
def test_other_words_are_another_line(shown: str, printed: str) -> None:
    assert pattern(shown) != pattern(printed)


def test_numbers_and_columns_may_vary() -> None:
    shown = ["step 20/600  loss 6.7519  6.91k tokens/s  step 296 ms", "...", "total   5m20s  100.0%  0.16"]
    printed = ["step 4/24  loss 8.3198  294 tokens/s  step 2.96 s", "else", "total  38.1 s  100.0%  n/a"]
    assert difference(shown, printed, numbers_vary=True) is None
    assert difference(shown, printed, numbers_vary=False) is not None
    assert difference(shown, printed[:2], numbers_vary=True) is not None
    assert difference(shown[:1], printed, numbers_vary=True) is not None


def test_renewing_keeps_what_was_left_out() -> None:
    assert renewed(["a 1", "...", "c 3"], ["a 5", "b 6", "c 7", "d"]) == (["a 5", "...", "c 7"], [])
    assert renewed(["a 1"], ["b"]) == (["b"], [])
    assert renewed(["...", "nothing like it"], ["b"]) == (["..."], ["nothing like it"])


def test_files_shown_in_a_page_are_written(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.play(Block("x", 1, "yaml", "sub/mine.yaml", "a: 1\n"))
    assert (tmp_path / "sub/mine.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_the_prose_exist(page: str) -> None:
    """`trainer/loop.py` and the like; a `*` stands for any name, a name without a folder is one of the file named before."""
    packages = "configs|planner|rundir|hlo|observe|sharding|loaders|models|trainer|explain|measure|launch|cli|tests|benchmarks|scripts|docs"
    for name in re.findall(rf"`((?:{packages})/[\w./*-]+?\.(?:py|yaml|md|sh))(?:::\w+)?`", (ROOT / page).read_text()):
        assert list(ROOT.glob(name)), f"{page}: {name}"
