"""The training loader: the same global batches for any number of processes, threads and workers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import DataConfig
from ridgeline.loaders.loader import Loader, Order, StepRows, build_loader
from ridgeline.loaders.manifest import CorpusError
from ridgeline.loaders.rows import Rows, RowSource
from tests.loaders.loader_worker import row_digests
from tests.loaders.token_corpora import random_docs, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A mixture of two corpora, one of two shards; an epoch of either is shorter than the tests read."""
    write_corpus(tmp_path / "a", [random_docs(0, 40), random_docs(1, 40)])
    write_corpus(tmp_path / "b", [random_docs(2, 30, masked_share=0.5)])
    train = [{"path": str(tmp_path / "a"), "weight": 3.0}, {"path": str(tmp_path / "b")}]
    return DataConfig.model_validate({"train": train, "seq_len": 32, "batch_size": 8, "prefetch": 2, "threads": 2})


ALL = np.arange(8)


def with_settings(data: DataConfig, **values: Any) -> DataConfig:
    return DataConfig.model_validate({**data.model_dump(), **values})


def test_one_two_four_and_eight_processes_read_the_same_global_batches(data: DataConfig) -> None:
    """Eight real processes; of them the first n share the rows of each batch, for n = 1, 2, 4, 8."""
    steps, start_step = 3, 5
    expected = row_digests(data, ALL, start_step, steps)
    assert len(set(expected.values())) > 20  # the rows differ from one another
    task = {"data": data.model_dump(mode="json"), "counts": [1, 2, 4, 8], "start_step": start_step, "steps": steps}
    running = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/loaders/loader_worker.py"), json.dumps({**task, "process": process})],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for process in range(8)
    ]
    found: dict[int, dict[tuple[int, int], str]] = {count: {} for count in (1, 2, 4, 8)}
    lines = 0
    for process in running:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        for line in out.splitlines():
            count, step, row, digest = line.split()
            found[int(count)][int(step), int(row)] = digest
            lines += 1
    assert lines == 4 * steps * 8  # no row was read by two processes
    for rows in found.values():
        assert rows == expected


def test_resuming_at_any_step_equals_the_uninterrupted_run(data: DataConfig) -> None:
    expected = row_digests(data, ALL, 0, 12)
    for start_step in (1, 2, 7, 11):
        assert row_digests(data, ALL, start_step, 12 - start_step).items() <= expected.items()


@pytest.mark.parametrize("settings", [{"threads": 1, "prefetch": 1}, {"threads": 8, "prefetch": 16}, {"workers": 2}])
def test_threads_prefetch_and_workers_do_not_change_the_batches(data: DataConfig, settings: dict[str, int]) -> None:
    assert row_digests(with_settings(data, **settings), ALL, 3, 6) == row_digests(data, ALL, 3, 6)


def test_rows_of_any_subset_are_those_of_the_whole_batch(data: DataConfig) -> None:
    expected = row_digests(data, ALL, 0, 4)
    assert row_digests(data, np.array([1, 6]), 0, 4).items() <= expected.items()


def test_the_seed_and_the_shuffle_switch_change_the_batches(data: DataConfig) -> None:
    def tokens(settings: DataConfig, seed: int) -> np.ndarray:
        loader = build_loader(settings, seed=seed, vocab_size=50, rows=ALL)
        batch = next(loader)
        loader.close()
        return batch["tokens"]

    batches = [tokens(data, 0), tokens(data, 1), tokens(with_settings(data, shuffle=False), 0)]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(batches, 2))
    np.testing.assert_array_equal(batches[0], tokens(data, 0))


def test_an_epoch_over_one_corpus_gives_every_target_once(tmp_path: Path) -> None:
    docs = random_docs(4, 64)
    write_corpus(tmp_path, [docs])
    tokens = sum(len(doc.tokens) for doc in docs)
    rows = -(-(tokens - 1) // 16)
    batch_size = next(size for size in range(8, 0, -1) if rows % size == 0)
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path)}], "seq_len": 16, "batch_size": batch_size})
    loader = build_loader(data, seed=0, vocab_size=50, rows=np.arange(batch_size))
    assert loader.rows_per_epoch == rows
    batches = [next(loader) for _ in range(rows // batch_size)]
    loader.close()
    counted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    assert sorted(counted.tolist()) == sorted(int(token) for doc in docs for token in doc.tokens[1:])


def test_epochs_are_counted_per_corpus(data: DataConfig) -> None:
    loader = build_loader(data, seed=0, vocab_size=50, rows=ALL)
    loader.close()
    drawn = 10 * 8
    a, b = (RowSource(source.path, 32).num_rows for source in data.train)
    assert list(loader.epochs(10).values()) == [pytest.approx(drawn * 0.75 / a), pytest.approx(drawn * 0.25 / b)]
    assert loader.epochs(0) == {str(source.path): 0.0 for source in data.train}


def test_the_wait_for_each_batch_is_measured(data: DataConfig) -> None:
    loader = build_loader(data, seed=0, vocab_size=50, rows=ALL)
    waits = []
    for _ in range(3):
        next(loader)
        waits.append(loader.last_wait_s)
    loader.close()
    assert all(wait > 0 for wait in waits)
    assert loader.wait_s == pytest.approx(sum(waits))


def test_closing_ends_the_reader_threads(data: DataConfig) -> None:
    before = set(threading.enumerate())
    loader = build_loader(data, seed=0, vocab_size=50, rows=ALL)
    next(loader)
    started = set(threading.enumerate()) - before
    assert started
    loader.close()
    for thread in started:
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_found_in_training_names_file_and_record(data: DataConfig, workers: int) -> None:
    directory = data.train[1].path
    shard = next(directory.glob("*.arrayrecord"))
    content = bytearray(shard.read_bytes())
    offsets = np.flatnonzero(np.frombuffer(content, np.uint8))
    loader = build_loader(with_settings(data, workers=workers), seed=0, vocab_size=50, rows=ALL)
    next(loader)
    loader.close()
    for place in offsets[len(offsets) // 3 : len(offsets) // 3 + 400]:
        content[place] ^= 0xFF
    before = shard.stat()
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk: size, time and inode did not change
    loader = build_loader(with_settings(data, workers=workers), seed=0, vocab_size=50, rows=ALL)
    with pytest.raises(CorpusError, match=rf"damaged (record \d+ of|shard:) {shard}"):
        list(itertools.islice(loader, 40))
    loader.close()


def test_workers_ignore_the_signals_that_reach_a_whole_job(data: DataConfig) -> None:
    """Ctrl-C and SIGTERM go to workers too, but the run still wants the batches of its last steps."""
    undisturbed = build_loader(data, seed=0, vocab_size=50, rows=ALL)
    expected = [next(undisturbed) for _ in range(12)]
    undisturbed.close()
    before = set(multiprocessing.active_children())
    loader = build_loader(with_settings(data, workers=2), seed=0, vocab_size=50, rows=ALL)
    batches = [next(loader), next(loader)]  # one of each worker: both are past their start
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    batches += [next(loader) for _ in range(10)]
    loader.close()
    for batch, right in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["tokens"], right["tokens"])
    assert not any(worker.is_alive() for worker in workers)


ORPHANS = """
import json, multiprocessing, sys, time
import numpy as np
from ridgeline.configs.schema import DataConfig
from ridgeline.loaders.loader import build_loader
loader = build_loader(DataConfig(**json.loads(sys.argv[1])), seed=0, vocab_size=50, rows=np.arange(8))
next(loader), next(loader)
print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
sys.stdin.read()
"""


def test_workers_exit_with_a_process_that_is_killed(data: DataConfig) -> None:
    settings = with_settings(data, workers=2).model_dump_json()
    command = [sys.executable, "-c", ORPHANS, settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        # the workers hold the pipe too: it ends when the last of them has
        ended = bool(select.select([process.stdout], [], [], 30)[0])
        for pid in [] if ended else workers:
            os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2
    assert ended


class _BackendProbe(RowSource):
    """Rows with the number of JAX backends that the reading process has initialized."""

    def read(self, rows: np.ndarray) -> Rows:
        bridge = sys.modules.get("jax._src.xla_bridge")
        count = 0 if bridge is None else len(bridge._backends)
        return {"backends": np.full((len(rows), 1), count), "process": np.full((len(rows), 1), os.getpid())}


def test_workers_of_a_process_that_uses_jax_use_no_device(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grain imports JAX where it is installed; a worker that also initialized a backend would take GPU memory from the run."""
    monkeypatch.syspath_prepend(ROOT)  # where the worker finds the probe
    assert jax.device_count() > 0
    source = _BackendProbe(data.train[0].path, 32)
    assert source.read(ALL)["backends"].all()  # the probe sees those of this process
    order = Order([source.num_rows], [1.0], seed=0, shuffle=True)
    settings = with_settings(data, workers=1)
    loader = Loader(StepRows([source], order, 8, ALL), source.manifest.tokenizer, settings, 0)
    batch = next(loader)
    loader.close()
    assert not (batch["process"] == os.getpid()).any()
    assert not batch["backends"].any()


def test_no_data_a_missing_corpus_and_a_missing_shard_are_refused_at_once(data: DataConfig, tmp_path: Path) -> None:
    def build(settings: DataConfig) -> None:
        build_loader(settings, seed=0, vocab_size=50, rows=ALL)

    with pytest.raises(UserError, match=r"data\.train is empty"):
        build(with_settings(data, train=[]))
    with pytest.raises(CorpusError, match=r"corpus not found: .*nowhere"):
        build(with_settings(data, train=[{"path": tmp_path / "nowhere"}]))
    shard = next(data.train[0].path.glob("*.arrayrecord"))
    shard.unlink()
    with pytest.raises(CorpusError, match=f"missing shard: {shard}"):
        build(data)


def test_other_tokenizers_and_larger_vocabularies_are_refused(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"model\.vocab_size=40"):
        build_loader(data, seed=0, vocab_size=40, rows=ALL)
    write_corpus(tmp_path / "c", [random_docs(3, 10)], sha256="c" * 64)
    mixed = with_settings(data, train=[*data.model_dump()["train"], {"path": tmp_path / "c"}])
    with pytest.raises(CorpusError, match=rf"{tmp_path}/c .*tokenizer.* {tmp_path}/a "):
        build_loader(mixed, seed=0, vocab_size=50, rows=ALL)
