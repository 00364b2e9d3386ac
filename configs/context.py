"""How attention runs over rows whose sequence is sharded over the mesh axis `context`, and what that needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ridgeline.configs.schema import Config

RING_BACKENDS = ("auto", "chunked", "pallas")
"""Values of `compute.attention.backend` that have a kernel for the ring."""


def context_method(config: Config, sizes: Mapping[str, int]) -> str | None:
    """Return `ring` or `all_to_all`, with `auto` resolved for a mesh of these axis sizes; None where the sequence is not sharded.

    auto: the one that moves fewer bytes, where both are possible. Per token of a device and layer, C devices on `context`, N query and K
    key/value heads: a ring passes keys and values on C - 1 times, (C - 1) * 2K heads; all-to-all exchanges queries, keys, values and
    results once, (C - 1)/C * (2N + 2K) heads.
    """
    wanted, context = config.compute.attention.context, sizes.get("context", 1)
    if context == 1:
        return None
    if wanted != "auto":
        return wanted
    capped = config.model.attention_softcap is not None
    if config.compute.attention.backend not in RING_BACKENDS or config.data.seq_len % (2 * context) or capped:
        return "all_to_all"
    heads, kv_heads = config.model.num_heads, config.model.kv_heads
    divides = not any(count % (context * sizes.get("tensor", 1)) for count in (heads, kv_heads))
    return "all_to_all" if divides and (heads + kv_heads) < context * kv_heads else "ring"


def context_problems(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, message) of each setting that does not go with `mesh.context` of this size."""
    context, tensor = sizes.get("context", 1), sizes.get("tensor", 1)
    if context == 1:
        return
    method, backend, length = context_method(config, sizes), config.compute.attention.backend, config.data.seq_len
    if method == "ring" and backend not in RING_BACKENDS:
        yield (
            ("compute.attention.backend", "compute.attention.context"),
            f"{backend} has no kernel for ring attention over mesh.context={context}; set compute.attention.backend=auto, "
            "or compute.attention.context=all_to_all",
        )
    if method == "ring" and config.model.attention_softcap is not None:
        yield (
            ("compute.attention.context", "model.attention_softcap"),
            "ring attention does not support soft-capping of scores; set compute.attention.context=all_to_all",
        )
    if method == "ring" and length % (2 * context):
        near = max(1, round(length / (2 * context))) * 2 * context
        yield (
            ("mesh.context", "data.seq_len"),
            f"data.seq_len={length} does not divide by 2 x mesh.context={context}: ring attention cuts a row into two chunks per device "
            f"(data.seq_len={near} works)",
        )
    if method == "all_to_all":
        for key, heads in (("model.num_heads", config.model.num_heads), ("model.num_kv_heads", config.model.kv_heads)):
            if heads % (context * tensor):
                over = f"mesh.context={context}" + (f" x mesh.tensor={tensor}" if tensor > 1 else "")
                yield (
                    ("mesh.context", "compute.attention.context", key),
                    f"{key}={heads} does not divide by {over}, which compute.attention.context=all_to_all needs; set it to ring",
                )
    if config.precision.block_scaled is not None:
        yield (
            ("precision.matmul", "mesh.context"),
            f"{config.precision.matmul} does not support mesh.context={context}; set precision.matmul=fp8, or mesh.context=1",
        )
    for logical, axes in config.mesh.rules.items():
        if logical in ("batch", "seq", "residual_seq") or "context" in axes:
            yield (
                (f"mesh.rules.{logical}", "mesh.context"),
                f"cannot be changed with mesh.context={context}; remove it, or set mesh.context=1",
            )
