"""Rematerialization policies (compute.remat) and the values they can keep: the one table of both.

models/remat.py applies the policies, planner/activations.py counts what they keep, planner/recompute.py what they recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.configs.errors import unknown_name


@dataclass(frozen=True, slots=True)
class RematPolicy:
    """One policy."""

    keeps: str
    """What the forward pass keeps for the backward pass."""
    takes_names: bool = False
    """Whether `compute.remat.names` lists the values to keep."""
    recomputes_block: bool = True
    """Whether the backward pass runs the whole block again, except for the values that are kept."""

    def kept(self, names: Sequence[str]) -> str:
        """Return `keeps` with the names in place of `{names}`."""
        return self.keeps.format(names=", ".join(names))


POLICIES: dict[str, RematPolicy] = {
    "none": RematPolicy(
        "inputs of attention and MLP, queries, keys, values, attention result, softmax statistics, MLP gate and up projections",
        recomputes_block=False,
    ),
    "attention-only": RematPolicy("the same without softmax statistics (only attention is recomputed)", recomputes_block=False),
    "dots": RematPolicy("block inputs and the results of matmuls with parameters"),
    "names": RematPolicy("block inputs and {names}", takes_names=True),
    "full": RematPolicy("block inputs"),
    "offload": RematPolicy("{names}, in host memory", takes_names=True),
}
"""Policy name -> policy, from most to least device memory."""

NAMES: dict[str, str] = {
    "block_input": "residual stream entering a block [B, T, D]",
    "query": "rotated queries [B, T, N, H]",
    "key": "rotated keys [B, T, K, H]",
    "value": "values [B, T, K, H]",
    "attention_context": "attention result before its output projection [B, T, N, H]",
    "attention_lse": "log-sum-exp of each attention row (backends chunked and pallas) [B, N, T]",
    "attention_out": "attention's update of the residual stream [B, T, D]",
    "mlp_gate": "gate projection before the activation [B, T, F]",
    "mlp_up": "up projection [B, T, F]",
    "mlp_out": "MLP's update of the residual stream [B, T, D]",
}
"""Values of a block that compute.remat.names can list (tagged with `jax.ad_checkpoint.checkpoint_name`) -> what they are."""


def offloads_inputs(policy: str, names: Sequence[str]) -> bool:
    """Return whether a policy keeps the inputs of blocks in host memory."""
    return policy == "offload" and "block_input" in names


def zeroes_embedding_early(policy: str, names: Sequence[str], context: int, tensor: int, *, experts: bool) -> bool:
    """Return whether the zeros of the embedding's gradient may be written before the backward pass of the layers.

    Elsewhere that gradient begins after the layers, which saves the size of the table. With rows sharded over `context` devices and inputs
    from host memory XLA then delays the last layer's weight gradients until its ring is done, which takes up to 19 % more memory (Llama 3.2
    3B, rows of 262,144 and 524,288 tokens). Not so with experts, nor where weight gradients come first, as without `tensor`
    (planner/recompute.py, gradients_first).
    """
    return context > 1 and tensor > 1 and offloads_inputs(policy, names) and not experts


def policy_help() -> str:
    """Return one sentence on what each policy keeps."""
    listed = "; ".join(f"{name}: {policy.kept(['the values in `names`'])}" for name, policy in POLICIES.items())
    return f"What is kept for the backward pass, from most to least device memory. {listed}. The rest of a block is recomputed."


def remat_problems(policy: str, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, message) for every rule that a policy and its names break."""
    if policy not in POLICIES:
        yield ("compute.remat.policy",), str(unknown_name("remat policy", policy, POLICIES))
    for name in names:
        if name not in NAMES:
            yield ("compute.remat.names",), str(unknown_name("value to save", name, NAMES))
    takes_names = policy in POLICIES and POLICIES[policy].takes_names
    if takes_names and not names:
        yield ("compute.remat.policy", "compute.remat.names"), f"'{policy}' needs compute.remat.names (allowed: {', '.join(NAMES)})"
    if names and not takes_names:
        users = " and ".join(name for name, each in POLICIES.items() if each.takes_names)
        yield (
            ("compute.remat.names", "compute.remat.policy"),
            f"only the policies {users} use compute.remat.names, not {policy} (set it to [])",
        )
