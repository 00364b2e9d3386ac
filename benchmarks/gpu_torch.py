"""The same model in PyTorch: transformers' Llama, torch.compile, fused attention, fused AdamW. Run by `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WARMUP_STEPS = 4


def rows_to_try(model: dict[str, Any], seq_len: int, rows: int, mode: str, memory_bytes: float, checkpointing: bool) -> int:
    """Return the rows to start with, at most `rows`, because every attempt that runs out of memory costs a compilation.

    Parameters: 16 bytes each with AdamW, 8 in bf16. Per token: logits in 16 bits, in float32 and their gradient, with a copy (14 V); in a
    layer the operands of its matmuls, and their results, in 16 bits (16 D + 8 F, with checkpointing 2 D). A tenth is left to fragments.
    """
    width, layers, vocab, hidden = model["embed_dim"], model["num_layers"], model["vocab_size"], model["mlp_dim"]
    attention = 2 * width * model["head_dim"] * (model["num_heads"] + model["num_kv_heads"])
    tables = vocab * width * (1 if model["tie_embeddings"] else 2)
    state = (tables + layers * (attention + 3 * width * hidden)) * (8 if mode == "bf16" else 18)
    token = 14 * vocab + layers * (2 * width if checkpointing else 16 * width + 8 * hidden)
    return max(1, min(rows, int((0.9 * memory_bytes - state) / (token * seq_len))))


def build(model: dict[str, Any], seq_len: int, mode: str) -> Any:
    """Return a randomly initialized Llama. mode: `autocast`: float32 parameters, bf16 arithmetic (as ours); `bf16`: bf16 parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model["vocab_size"], hidden_size=model["embed_dim"], intermediate_size=model["mlp_dim"],
        num_hidden_layers=model["num_layers"], num_attention_heads=model["num_heads"], num_key_value_heads=model["num_kv_heads"],
        head_dim=model["head_dim"], max_position_embeddings=max(seq_len, 2048), rope_theta=model["rope_theta"],
        tie_word_embeddings=model["tie_embeddings"], use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        made = LlamaForCausalLM(config)
    return made.to(torch.bfloat16 if mode == "bf16" else torch.float32)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train on random tokens; return step time, spread, memory and losses. The rows per step are reduced by a third until they fit."""
    import torch

    rows = job["rows"]
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        rows = rows_to_try(job["model"], job["seq_len"], rows, job["mode"], memory_bytes, job["checkpointing"])
    while True:
        try:
            return measure_rows(job, rows)
        except torch.cuda.OutOfMemoryError:
            if rows == 1:
                raise
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        rows = max(1, rows * 2 // 3)
        print(f"out of memory: {rows} rows", file=sys.stderr)


def measure_rows(job: dict[str, Any], rows: int) -> dict[str, Any]:
    """Train with a number of rows. Raises torch.cuda.OutOfMemoryError."""
    import torch

    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build(job["model"], job["seq_len"], job["mode"])
    model.train()
    if job["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda or None)
    tokens = torch.randint(0, job["model"]["vocab_size"], (rows, job["seq_len"]), device="cuda" if cuda else "cpu")
    compiled = torch.compile(model) if job["compile"] else model
    cast = torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=job["mode"] == "autocast")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with cast:
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    begun = time.perf_counter()
    first = step()
    wait()
    compile_s = time.perf_counter() - begun
    for _ in range(WARMUP_STEPS - 1):
        begun = time.perf_counter()
        step()
        wait()
        once = time.perf_counter() - begun
    count = job["steps"] or max(2, min(14, round(job["measured_s"] / 3 / once)))
    rounds, last = [], first
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(count):
            last = step()
        wait()
        rounds.append((time.perf_counter() - begun) / count)
    return {
        "torch": torch.__version__,
        "rows": rows,
        "compile_s": compile_s,
        "step_s": statistics.median(rounds),
        "spread": (max(rounds) - min(rounds)) / statistics.median(rounds),
        "losses": [float(first), float(last)],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def main() -> None:
    """Child process: read a job as JSON from standard input, write the result to the file it names."""
    job = json.loads(sys.stdin.read())
    Path(job["output"]).write_text(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
