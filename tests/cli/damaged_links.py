"""Links in a run directory that lead outside, and the commands that write into a run: they must not write or delete there.

`python -m tests.cli.damaged_links --cases 300 --seed 1` runs a long campaign; tests/cli/test_damaged_links.py runs a sample.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli import damaged
from tests.cli.outside import changes, own_places, state

CAPTURE = "tensorboard/plugins/profile/steps0000005-0000006"
FILES = (
    *("run.json", "config.yaml", "events.jsonl", "metrics.jsonl", "train.log", "plan.json", "compile.json", "attempts.jsonl"),
    *("slurm/jobs.jsonl", "lease/00000001/beat", "lease/00000001/holder.json", "tokenizer/bytes.json"),
    *(f"{CAPTURE}/analysis.json", f"{CAPTURE}/breakdown.png", f"{CAPTURE}/capture.json"),
    *("checkpoints/ridge-checkpoints.json", "checkpoints/step_00000008/integrity.json", "checkpoints/step_00000008/metadata.json"),
    *("checkpoints/step_00000004/commit_success.txt", "checkpoints/step_00000008/commit_success.txt"),
)
"""Files that are moved outside, with a link in their place."""
DIRECTORIES = (
    *("lease", "lease/00000001", "tokenizer", "slurm", "slurm/1", "checkpoints/step_00000004", "checkpoints/step_00000008"),
    *("checkpoints/step_00000008/state", "checkpoints/step_00000004/state", CAPTURE),
    *("tensorboard/plugins", "tensorboard/plugins/profile", "tensorboard/steps"),
)
ABSENT = (
    *("run.json.tmp", "config.yaml.tmp", "config.1.yaml", "config.1.yaml.tmp", "compile.json.tmp", "plan.json.tmp", "stacks.0.txt"),
    *("lease/.scratch", ".profile.0", "profile", ".tokenizer.new", ".tokenizer.old", ".tokenizer.merged"),
    *("tensorboard/steps", "skipped_batches.json.tmp", "ledger.json.tmp", "reference.npz.tmp", "git.1.diff", "git.1.diff.tmp"),
    *(f"{CAPTURE}/analysis.json.tmp", f"{CAPTURE}/breakdown.png.tmp"),
    *("checkpoints/ridge-checkpoints.json.tmp", "checkpoints/step_00000008/integrity.json.tmp", "checkpoints/step_00000010"),
    *("checkpoints/step_00000008/commit_success.txt.tmp", "checkpoints/step_00000008.bad-replaced", "checkpoints/step_00000004.deleting"),
    *("checkpoints/step_00000010.orbax-checkpoint-tmp", "checkpoints/step_00000002.bad-sha256", "checkpoints/step_00000008.bad-sha256"),
)
"""Names that a command writes, with a link of that name to a file, a directory or nothing."""
TRAIN_LIMIT_S = 180
STATES = ("good", "damaged", "damaged with a copy", "incomplete", "without a manifest")


@dataclass(frozen=True)
class Case:
    """Links in a run directory and a command that writes into it."""

    moved: tuple[str, ...]
    """Places whose content is outside."""
    linked: tuple[tuple[str, str], ...]
    """Absent places that are links, and to what: file, directory or nothing."""
    newest: str
    """State of the newest checkpoint: one of STATES."""
    command: tuple[str, ...]


def commands(root: Path) -> list[tuple[str, ...]]:
    """The commands that write into the run and start no training."""
    run = str(root / "linked")
    return [
        ("checkpoint", "prune", run, "--keep-last", "1", "--keep-set-aside", "0"),
        ("checkpoint", "prune", run, "--keep-last", "2"),
        ("checkpoint", "repair", run),
        ("checkpoint", "repair", run, "--delete"),
        ("checkpoint", "verify", run),
        ("analyze", run, "--save"),
        ("report", run, "-o", str(root / "out.html")),
        ("goodput", run),
    ]


def train(root: Path) -> tuple[str, ...]:
    """The command that continues the run, with a capture."""
    return (
        "train",
        str(root / "small.yaml"),
        f"run_dir={root / 'linked'}",
        "trainer.steps=10",
        "profiler.start_step=9",
        "profiler.num_steps=1",
    )


def cases(root: Path, seed: int, *, training: bool) -> Iterator[Case]:
    """Yield drawn cases without end."""
    source = random.Random(seed)
    while True:
        absent = source.sample(ABSENT, source.choice([0, 1, 1, 2, 8]))
        moved = source.sample([*FILES, *DIRECTORIES], source.choice([0, 1, 1, 2, 3]))
        if not absent and not moved:
            continue
        linked = tuple((name, source.choice(["file", "directory", "nothing"])) for name in absent)
        command = train(root) if training and source.random() < 0.1 else source.choice(commands(root))
        yield Case(tuple(moved), linked, source.choice(STATES), command)


def make(root: Path, case: Case) -> None:
    """Make root/linked, a copy of the run with the links of a case, and root/victim, where they lead."""
    linked, victim = root / "linked", root / "victim"
    for place in (linked, victim):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root / "run", linked)
    (victim / "directory/00000000").mkdir(parents=True)
    (victim / "directory/.settings").mkdir()
    for name in ("file", "directory/notes.txt", "directory/00000000/notes.txt", "directory/.settings/notes.txt", "directory/beat"):
        (victim / name).write_text("mine, without a newline at the end")
    newest = linked / "checkpoints/step_00000008"
    if case.newest == "damaged with a copy":
        shutil.copytree(newest, newest.with_name(f"{newest.name}.bad-manifest"))
    if case.newest.startswith("damaged"):
        (newest / "commit_success.txt").write_text("damaged")
    if case.newest in ("incomplete", "without a manifest"):
        (newest / "integrity.json").unlink()
    if case.newest == "incomplete":
        (newest / "metadata.json").unlink()
    for number, name in enumerate(case.moved):
        place = linked / name
        if os.path.lexists(place) and place.parent.resolve().is_relative_to(linked.resolve()):
            place.rename(victim / f"{number}-{place.name}")
            place.symlink_to(victim / f"{number}-{place.name}")
    for name, kind in case.linked:
        place = linked / name
        if not os.path.lexists(place) and place.parent.is_dir() and place.parent.resolve().is_relative_to(linked.resolve()):
            place.symlink_to(victim / kind)


def trained(arguments: list[str]) -> tuple[int, str, str | None]:
    """Run the command in a process of its own, whose threads end with it; return as `damaged.guarded` does."""
    program = "import sys; from ridgeline.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=TRAIN_LIMIT_S, check=False)
    return done.returncode, done.stderr, "a traceback: " + done.stderr[-600:] if "Traceback" in done.stderr else None


def problem(root: Path, case: Case) -> str | None:
    """Return what is wrong with the answer, or what the command changed outside of the run; None when nothing is."""
    top = root.parent
    with own_places(top) as cache:
        make(root, case)
        writable = (root / "linked", root / "out.html", cache)
        before = state(top, writable)
        code, errors, raised = (trained if case.command[0] == "train" else damaged.guarded)(list(case.command))
        changed = changes(top, before, state(top, writable))
    if changed is not None or raised is not None:
        return changed or raised
    lines = [line for line in errors.strip().splitlines() if line.startswith("ridge: error: ")]
    if code == 2:
        return None if len(lines) == 1 and str(root) in lines[0] else f"not one line that names a file: {errors[-600:]}"
    return None if code in (0, 1) and not lines else f"exit code {code}: {errors[-600:]}"


def main() -> None:
    """Run a campaign and print each distinct problem once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top", type=Path, help="Keep and reuse the run in this directory.")
    parser.add_argument("--training", action=argparse.BooleanOptionalAction, default=True, help="Also continue the run (20 s each).")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = (arguments.top or Path(made)) / "root"
        if not (root / "run").exists():
            damaged.make_run(root)
        drawn = cases(root, arguments.seed, training=arguments.training)
        sys.exit(damaged.campaign(drawn, arguments.cases, lambda case: problem(root, case)))


if __name__ == "__main__":
    main()
