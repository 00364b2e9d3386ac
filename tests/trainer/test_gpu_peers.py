"""The peers of the benchmark for real GPUs: MaxText gets our shape, what should fit is tried first, and its steps are timed at rest."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"
H200_BYTES = 150e9


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def shape(name: str) -> tuple[dict[str, Any], Any]:
    """Return a row's model as peers get it, and its config."""
    from gpu_rows import ROWS, row_config

    config = row_config(next(row for row in ROWS if row.name == name), rows=64)
    model = config.model
    return {**model.model_dump(mode="json"), "num_kv_heads": model.kv_heads, "head_dim": model.head_width}, config


def test_maxtext_gets_our_shape_tokens_and_arithmetic() -> None:
    from gpu_maxtext import Attempt, arguments

    model, config = shape("1b-1k")
    given = dict(setting.split("=", 1) for setting in arguments(model, 1024, Attempt("dot_product", "full", 48), 10, "/out", "gpu"))
    m = config.model
    ours = {
        "base_emb_dim": m.embed_dim, "base_num_decoder_layers": m.num_layers, "base_num_query_heads": m.num_heads,
        "base_num_kv_heads": m.num_kv_heads, "head_dim": m.head_dim, "base_mlp_dim": m.mlp_dim, "vocab_size": m.vocab_size,
        "logits_via_embedding": "true", "rope_max_timescale": 500_000, "per_device_batch_size": 48, "max_target_length": 1024,
        "attention": "dot_product", "remat_policy": "full", "dtype": config.precision.compute, "weight_dtype": "float32", "steps": 10,
        "opt_type": "adamw", "packing": "false", "dataset_type": "synthetic", "enable_checkpointing": "false", "hardware": "gpu",
    }  # fmt: skip
    assert {name: given.get(name) for name in ours} == {name: str(value) for name, value in ours.items()}


@pytest.mark.parametrize("row", ["1b-1k", "1b-8k", "3b-4k", "8b-4k"])
def test_maxtext_begins_with_what_should_fit_and_each_attempt_takes_less_memory(row: str) -> None:
    from gpu_maxtext import LEAST_TOKENS, POLICIES, attempts, state_bytes, token_bytes

    model, config = shape(row)
    seq_len = config.data.seq_len
    if row == "8b-4k":
        model |= {"num_layers": 17}
    tried = list(attempts(model, seq_len, 64, H200_BYTES, "cudnn_flash_jax"))
    taken = [state_bytes(model) + token_bytes(model, each.remat) * each.rows * seq_len for each in tried]
    assert taken[0] < 0.9 * H200_BYTES
    assert [each.remat for each in tried] == sorted((each.remat for each in tried), key=POLICIES.index), "the fastest first"
    for before, after in itertools.pairwise(tried):
        assert after.rows < before.rows or after.remat != before.remat
    assert tried[-1].remat == "full" and tried[-1].rows == 1
    assert tried[0].rows * seq_len >= LEAST_TOKENS


def test_a_model_whose_state_does_not_fit_is_still_tried_once_with_a_row() -> None:
    from gpu_maxtext import Attempt, attempts

    model, _ = shape("8b-4k")
    assert list(attempts(model, 4096, 8, 80e9, "dot_product")) == [Attempt("dot_product", "full", 1)]


def test_the_clock_is_read_at_rest_after_the_first_step_the_warm_up_and_each_round() -> None:
    from gpu_maxtext import ROUNDS, WARMUP_STEPS, Clock

    now, waited, step_s = [0.0], list[int](), iter([9.0] + [3.0] * (WARMUP_STEPS - 1) + [1.0] * 5 + [2.0] * 5 + [1.5] * 5)
    clock = Clock(5, waited.append, lambda: now[0])

    def iteration(device_state: dict[str, Any], host: str) -> dict[str, Any]:
        now[0] += next(step_s)
        device_state["state"] += 1
        assert host == "host"
        return {"scalar": {"learning/loss": 1.0 / device_state["state"]}}

    timed, state = clock.around(iteration), {"state": 0}
    for _ in range(WARMUP_STEPS + ROUNDS * 5):
        timed(state, "host")
    assert clock.rounds() == [1.0, 2.0, 1.5] and clock.first == 9.0
    assert waited == [1, *(WARMUP_STEPS + 5 * count for count in range(ROUNDS + 1))]
    assert clock.losses == sorted(clock.losses, reverse=True) and len(clock.losses) == ROUNDS + 2


class Runner:
    """Answers children as a machine would on which cuDNN's kernel runs out of memory twice, then fails; records what they were asked."""

    def __init__(self, output: Path, words: list[str]) -> None:
        self.output, self.words, self.jobs, self.env = output, words, list[dict[str, Any]](), dict[str, str]()

    def child(self, program: list[str], job: dict[str, Any] | None, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Fail with the next words, or write a result when there are none."""
        assert job is not None
        self.jobs.append(job)
        self.env = env
        if self.words:
            return subprocess.CompletedProcess(program, 1, "", self.words.pop(0))
        Path(job["output"]).write_text(json.dumps({"step_s": 0.5, "losses": [2.0, 1.0]}))
        return subprocess.CompletedProcess(program, 0, "", "")

    def log(self, words: str) -> None:
        """Say nothing."""


def test_maxtext_is_tried_with_less_where_memory_ends_and_with_another_kernel_where_one_fails(tmp_path: Path) -> None:
    from gpu_budget import MAXTEXT, Part
    from gpu_peers import measure_peer
    from gpu_rows import ROWS

    _, config = shape("1b-1k")
    runner = Runner(tmp_path, ["XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory", "No engine found"])
    env = {"XLA_FLAGS": "--ours"}
    found = measure_peer(runner, Part(ROWS[0], MAXTEXT), config, step_s=0.1, env=env, memory_bytes=H200_BYTES, tiny=False, steps=None)
    requests = [job["attempt"] for job in runner.jobs]
    assert [each["attention"] for each in requests] == ["cudnn_flash_jax", "cudnn_flash_jax", "dot_product"]
    assert requests[1]["rows"] < requests[0]["rows"] == requests[2]["rows"]
    assert runner.env == {**env, "DECOUPLE_GCLOUD": "TRUE"}, "the flags ours ran with"
    assert found["tokens_per_s"] == found["rows"] * 1024 / 0.5 and found["rows"] == requests[2]["rows"]
    assert found["attention"] == "dot_product" and runner.jobs[0]["per_round"] == 14


def test_a_peer_whose_time_is_up_is_not_tried_again(tmp_path: Path) -> None:
    from gpu_budget import MAXTEXT, Part
    from gpu_peers import OUT_OF_TIME, measure_peer
    from gpu_rows import ROWS

    runner = Runner(tmp_path, [OUT_OF_TIME])
    found = measure_peer(
        runner, Part(ROWS[0], MAXTEXT), shape("1b-1k")[1], step_s=0.1, env={}, memory_bytes=H200_BYTES, tiny=False, steps=None
    )
    assert found["error"] == OUT_OF_TIME and len(runner.jobs) == 1
