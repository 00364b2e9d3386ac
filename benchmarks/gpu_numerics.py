"""Numbers of the GPU kernels against a CPU in float32, on inputs drawn at random; in the last part whole training steps.

`python benchmarks/gpu_numerics.py [attention | experts | float8 | steps] [--seed N] [--output FILE] [--tiny]`

* attention: outputs and gradients of cuDNN's and our Pallas kernels, for masks with and without window, packed rows, sinks, grouped heads.
* experts: the grouped matmuls in bfloat16 and float8 (Pallas), for loads drawn at random, empty experts included, and the backward pass of
  their activation (Pallas).
* float8: the layers' matmuls in 8 bits against the product of the same rounded operands.
* steps: losses of five training steps of small models of several families, on the GPU and on the CPU of the same machine.

Errors are ||x - reference|| / ||reference||. Needs one NVIDIA GPU and no network. `--tiny` runs on a CPU, the Pallas kernels interpreted.
Exit code: 1 when an error exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import gpu_needs  # noqa: F401  # reports missing packages
import numpy as np
from checkout import ROOT

ROUNDING = 2.0**-7
"""Limit of results in bfloat16: two units of its last place (2^-8), as the sums of the kernels and of the reference differ in order."""
EXACT = 1e-5
"""Limit where only the order of float32 sums differs."""
LOSS = 2e-4
"""Limit of a loss of float32 steps."""

Check = tuple[str, float, float]
"""Name, error, limit."""
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama-3.2-1b": (),
    "qwen3-8b": ("data.document_masking=true",),
    "gemma2-2b": ("model.full_attention_every=2",),
    "qwen3-30b-a3b": ("model.moe.experts=8", "model.moe.experts_per_token=2", "model.moe.expert_dim=128"),
    "gpt-oss-20b": ("model.moe.experts=8", "model.moe.experts_per_token=2", "model.moe.expert_dim=128", "data.document_masking=true"),
}
SMALL = ("model.num_layers=2", "model.embed_dim=256", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=64",
         "model.mlp_dim=512", "model.vocab_size=1024", "data.seq_len=256", "data.batch_size=4", "mesh.fsdp=1", "optimizer.kind=adamw",
         "optimizer.learning_rate=1e-3", "schedule.kind=constant")  # fmt: skip
"""Of the models of `steps`."""


def error(found: Any, reference: Any) -> float:
    """Return the relative error in the Frobenius norm; infinite where a value is not finite."""
    x, y = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y)) if np.isfinite(x).all() else float("inf")


def packed(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Return segment ids [rows, length] of documents of random lengths; the end of the last row is padding."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        cuts = np.sort(rng.choice(np.arange(1, length), size=4, replace=False))
        row[:] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
    ids[-1, length - length // 8 :] = 0
    return ids


def attention(rng: np.random.Generator, tiny: bool) -> Iterator[Check]:
    """Check every kernel on every mask it supports."""
    import jax
    import jax.numpy as jnp

    from ridgeline.models.attention import AttentionRequest, attend
    from ridgeline.models.attention.dispatch import BACKENDS

    cpu = jax.devices("cpu")[0]
    widths = (32,) if tiny else (64, 128)
    names = ("chunked",) if tiny else ("cudnn", "pallas")
    for width in widths:
        for label, window, documents, sinks in (
            ("causal", None, False, False), ("window", 100, False, False), ("packed", None, True, False),
            ("packed, window", 70, True, False), ("sinks", None, False, True), ("packed, window, sinks", 90, True, True),
        ):  # fmt: skip
            length, heads, kv_heads = int(rng.integers(129, 700)), *((8, 2), (6, 6), (4, 1))[rng.integers(3)]
            shapes = [(2, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
            arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
            ids = packed(rng, 2, length) if documents else None
            logits = jnp.asarray(rng.standard_normal(heads), jnp.float32) if sinks else None

            def run(backend: str, arrays: Any, logits: Any, ids: Any, window: int | None = window) -> Any:
                def call(q: Any, k: Any, v: Any, logits: Any) -> Any:
                    return attend(q, k, v, segment_ids=ids, sliding_window=window, sinks=logits, backend=backend)

                out, pull = jax.vjp(call, *arrays[:3], logits)
                return [out, *(x for x in pull(arrays[3]) if x is not None)]

            with jax.default_device(cpu):
                wide = [jax.device_put(x, cpu).astype(jnp.float32) for x in arrays]
                reference = jax.jit(partial(run, "reference"))(wide, None if logits is None else jax.device_put(logits, cpu), ids)
            for name in names:
                request = AttentionRequest(jax.default_backend(), jnp.dtype("bfloat16"), width, heads, kv_heads, True, window,
                                           packed=documents, length=length, sinks=sinks)  # fmt: skip
                if BACKENDS[name].refusal(request) is not None:
                    continue
                found = jax.jit(partial(run, name))(arrays, logits, ids)
                worst = max(error(x, y) for x, y in zip(found, reference, strict=True))
                yield f"{name}, {label}, width {width}, {heads}/{kv_heads} heads, {length} tokens", worst, ROUNDING


def experts(rng: np.random.Generator, tiny: bool) -> Iterator[Check]:
    """Check the grouped matmuls."""
    import jax
    import jax.numpy as jnp

    from ridgeline.models.activation import ExpertActivation
    from ridgeline.models.moe.grouped_matmul import Blocks

    count, inputs, outputs, assignments = (4, 128, 128, 96) if tiny else (8, 512, 768, 3000)
    for left, right in (("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")):
        kernel = Blocks(interpret=tiny)
        load = rng.multinomial(assignments, rng.dirichlet(np.full(count, 0.5))).astype(np.int32)
        load[rng.integers(count)] = 0
        total = int(load.sum())
        rows = kernel.rows(total, count)
        starts = np.asarray(kernel.starts(jnp.asarray(load), total))
        owner = np.full(rows, -1)
        for expert in range(count):
            owner[starts[expert] : starts[expert] + load[expert]] = expert
        used = owner >= 0

        def drawn(*shape: int, dtype: str) -> Any:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

        x, w, y = drawn(rows, inputs, dtype=left), drawn(inputs, count, outputs, dtype=right), drawn(rows, outputs, dtype=right)
        x, y = (jnp.where(used[:, None], v.astype(jnp.float32), 0).astype(v.dtype) for v in (x, y))
        wide = [np.asarray(v.astype(jnp.float32)) for v in (x, w, y)]
        label = f"{left} x {right}"
        straight = np.stack([wide[0][r] @ wide[1][:, owner[r]] if used[r] else np.zeros(outputs) for r in range(rows)])
        found = jax.jit(kernel.matmul)(x, w, load)
        yield f"rows, {label}", error(np.asarray(found.astype(jnp.float32))[used], straight[used]), ROUNDING
        back = jax.jit(partial(kernel.matmul, transposed=True))(x, jnp.swapaxes(w, 0, 2), load)
        yield f"rows, transposed, {label}", error(np.asarray(back.astype(jnp.float32))[used], straight[used]), ROUNDING
        outer = jax.jit(partial(kernel.outer, dtype=jnp.dtype("float32")))(x, y, load)
        expected = np.stack([wide[0][owner == e].T @ wide[2][owner == e] for e in range(count)], 1)
        yield f"gradient of weights, {label}", error(outer, expected), 1e-3
    # the activation's backward pass, whose kernel writes to its inputs
    for scale_input in (False, True):
        activation = ExpertActivation("silu", scale_input=scale_input, in_place=True, interpret=tiny)
        rows = assignments - 3  # no whole tiles
        arrays = [drawn(rows, outputs + 16, dtype="bfloat16") for _ in range(3)]
        weight = jnp.asarray(rng.random(rows), jnp.float32)

        def run(activation: Any, weight: Any, *arrays: Any) -> Any:
            return jax.tree.leaves(activation.gradients(arrays[:2], arrays[2], weight, weighted=True))

        wide = [each.astype(jnp.float32) for each in arrays]
        expected = run(replace(activation, in_place=False), weight, *wide)
        worst = max(error(x, y) for x, y in zip(jax.jit(partial(run, activation))(weight, *arrays), expected, strict=True))
        yield f"gradients of the activation{', scaled inputs' if scale_input else ''}", worst, ROUNDING


def float8(rng: np.random.Generator, tiny: bool) -> Iterator[Check]:
    """Check 8-bit products, as XLA compiles them, against float32 products of the same rounded operands."""
    import jax
    import jax.numpy as jnp

    from ridgeline.models.matmul import fp8

    for m, k, n in ((64, 128, 32),) if tiny else ((1024, 4096, 2048), (4096, 2048, 512)):
        for right in (fp8.VALUES, fp8.GRADIENTS):
            pair = [jnp.asarray(rng.standard_normal(shape) * rng.lognormal(0, 2), jnp.bfloat16) for shape in ((m, k), (k, n))]

            def run(left: Any, other: Any, right: Any = right) -> Any:
                operands = fp8.quantize(left, fp8.VALUES), fp8.quantize(other, right)
                product = jnp.matmul(*(fp8.dequantize(q, scale, jnp.bfloat16) for q, scale in operands))
                return product, [q.astype(jnp.float32) * scale for q, scale in operands]

            product, operands = jax.jit(run)(*pair)
            expected = np.asarray(operands[0], np.float64) @ np.asarray(operands[1], np.float64)
            yield f"{m} x {k} x {n}, e4m3 x {right.name}", error(product.astype(jnp.float32), expected), ROUNDING


def steps(rng: np.random.Generator, tiny: bool) -> Iterator[Check]:
    """Check the losses of training steps, in float32 against the CPU's and in bfloat16 against float32."""
    import jax

    from ridgeline.configs.load import load

    platforms = ("cpu", "cpu") if tiny else ("cuda", "cpu")
    seed = int(rng.integers(1000))
    for model, more in list(FAMILIES.items())[: 1 if tiny else None]:
        losses = {}
        for dtype in ("float32", "bfloat16"):
            settings = [*SMALL, *more, f"precision.compute={dtype}", f"seed={seed}"]
            config = load(ROOT / f"configs/models/{model}.yaml", settings).config
            for platform in dict.fromkeys(platforms[: 2 if dtype == "float32" else 1]):
                device = jax.devices(platform)[0]
                with jax.default_device(device), jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                    losses[platform, dtype] = trained(config, device, seed)
        reference = losses["cpu", "float32"]
        far = max(abs(x / y - 1) for x, y in zip(losses[platforms[0], "float32"], reference, strict=True))
        yield f"{model}, float32, {reference[0]:.4f} to {reference[-1]:.4f}", far, LOSS
        far = max(abs(x / y - 1) for x, y in zip(losses[platforms[0], "bfloat16"], reference, strict=True))
        yield f"{model}, bfloat16", far, 0.01


def trained(config: Any, device: Any, seed: int) -> list[float]:
    """Return the losses of five steps on one batch of random tokens."""
    import jax
    from gpu_rows import random_batch

    from ridgeline.sharding.mesh import build_mesh
    from ridgeline.sharding.partition import Partitioner
    from ridgeline.sharding.rules import Rules
    from ridgeline.trainer.optimizers import build_optimizer
    from ridgeline.trainer.schedules import build_schedule
    from ridgeline.trainer.state import abstract_state, init_state, model_spec
    from ridgeline.trainer.step import make_train_step

    partitioner = Partitioner(build_mesh(config.mesh, [device]), Rules.from_config(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    state = init_state(config, spec, optimizer, abstract_state(config, spec, optimizer, partitioner))
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    step = jax.jit(make_train_step(spec, config, optimizer, schedule, partitioner), donate_argnums=0)
    batch = {name: jax.device_put(x, device) for name, x in random_batch(config, seed).items()}
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


PARTS: dict[str, Callable[[np.random.Generator, bool], Iterator[Check]]] = {
    "attention": attention, "experts": experts, "float8": float8, "steps": steps,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; print a line per check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    seed = int(np.random.default_rng().integers(10**6)) if args.seed is None else args.seed
    results: list[dict[str, Any]] = []
    begun, wrong = time.monotonic(), 0
    for name in args.parts or PARTS:
        try:
            for label, found, limit in PARTS[name](np.random.default_rng(seed), args.tiny):
                wrong += not found <= limit
                results.append({"part": name, "check": label, "error": found, "limit": limit})
                verdict = "ok  " if found <= limit else "FAIL"
                print(f"[{time.monotonic() - begun:4.0f} s] {verdict} {found:.2e} of {limit:.0e}  {name}: {label}", flush=True)
        except Exception as failure:  # one part must not end the others
            wrong += 1
            results.append({"part": name, "check": "run", "failure": f"{type(failure).__name__}: {failure}"[:2000]})
            print(f"FAIL {name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
    print(f"seed {seed}: {len(results) - wrong} of {len(results)} checks passed")
    if args.output is not None:
        args.output.write_text(json.dumps({"seed": seed, "checks": results}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
