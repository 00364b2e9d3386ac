"""The same model in PyTorch: transformers' decoder, torch.compile, fused attention, chunked loss (gpu_torch_parts.py) and fused AdamW.

Run by `benchmarks/gpu.py`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checkout import leave_directory
from gpu_torch_parts import ATTENTION, CHUNK_TOKENS, ChunkedLoss, causal_attention, fused_attention, use_float8
from torch import nn

WARMUP_STEPS = 4


def rows_to_try(model: dict[str, Any], seq_len: int, rows: int, mode: str, memory_bytes: float, checkpointing: bool) -> int:
    """Return the rows to start with, at most `rows`, because every attempt that runs out of memory costs a compilation.

    Parameters: 18 bytes each with AdamW (a copy in 16 bits included), 8 in bf16, and 4 more of the table's gradient, twice. Per token and
    layer, what compiled layers keep (8 D + 4 F, with checkpointing 2 D): 18 layers of the 8B shape had 1.6 MB per token on an H200. Logits
    only of a chunk, 10 bytes each. A tenth is left to fragments.
    """
    width, layers, vocab, hidden = model["embed_dim"], model["num_layers"], model["vocab_size"], model["mlp_dim"]
    attention = 2 * width * model["head_dim"] * (model["num_heads"] + model["num_kv_heads"])
    tables = vocab * width * (1 if model["tie_embeddings"] else 2)
    state = (tables + layers * (attention + 3 * width * hidden)) * (8 if mode == "bf16" else 18) + 8 * vocab * width
    token = 6 * width + layers * (2 * width if checkpointing else 8 * width + 4 * hidden)
    free = 0.9 * memory_bytes - state - 10 * CHUNK_TOKENS * vocab
    return max(1, min(rows, int(free / (token * seq_len))))


class Trained(nn.Module):
    """transformers' decoder and our loss, in one of the modes.

    `autocast`: float32 parameters, bf16 arithmetic (as ours). `bf16`: bf16 parameters too. `fp8`: as autocast, the layers' matmuls in
    float8. `float32`: for tests.
    """

    def __init__(self, hf: dict[str, Any], mode: str, *, compile: bool, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION, causal_attention)
        config = AutoConfig.for_model(**{key: value for key, value in hf.items() if key not in ("architectures", "torch_dtype")})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
        self.causal_lm = made.to(torch.bfloat16) if mode == "bf16" else made
        self.float8_layers = use_float8(made.model.layers) if mode == "fp8" else 0
        self.mode, self.dtype = mode, torch.float32 if mode == "float32" else torch.bfloat16
        self._loss = ChunkedLoss(compile=compile, tokens=chunk_tokens)
        self._hidden = torch.compile(self.hidden) if compile else self.hidden

    def hidden(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [B, T, D]. The residual stream is in the dtype of the arithmetic, as ours."""
        decoder = self.causal_lm.model
        x_BTD = decoder.embed_tokens(tokens_BT).to(self.dtype)
        found: torch.Tensor = decoder(inputs_embeds=x_BTD, use_cache=False).last_hidden_state.to(self.dtype)
        return found

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of next tokens, float32 scalar. tokens [B, T + 1]."""
        with fused_attention(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.mode in ("autocast", "fp8")):
            x_BTD = self._hidden(tokens[:, :-1])
        return self._loss(x_BTD, self.causal_lm.lm_head.weight, tokens[:, 1:])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train on random tokens; return step time, spread, memory and losses. The rows per step are reduced by a third until they fit."""
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
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Trained(job["hf"], job["mode"], compile=job["compile"])
    model.train()
    if job["checkpointing"]:
        model.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda or None)
    tokens = torch.randint(0, job["model"]["vocab_size"], (rows, job["seq_len"] + 1), device="cuda" if cuda else "cpu")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens)
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
    if not math.isfinite(float(last)):
        raise ArithmeticError(f"the loss is {float(last)}: the time of such steps means nothing")
    return {
        "torch": torch.__version__,
        "rows": rows,
        "compile_s": compile_s,
        "step_s": statistics.median(rounds),
        "spread": (max(rounds) - min(rounds)) / statistics.median(rounds),
        "losses": [float(first), float(last)],
        "float8_layers": model.float8_layers,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def main() -> None:
    """Child process: read a job as JSON from standard input, write the result to the file it names."""
    leave_directory()
    job = json.loads(sys.stdin.read())
    Path(job["output"]).write_text(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
