"""Rematerialization: which values of a block are saved for the backward pass, as named policies over checkpoint names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.remat import POLICIES, remat_problems
from ridgeline.configs.schema import RematConfig

ADAPTER = "adapter"
"""Checkpoint name of what an adapter saves: its narrow vectors and, with a magnitude, the result before it."""
GROUPED_MATMUL = "grouped_matmul"
"""Checkpoint name of the results of the experts' first matmuls, which are no dots."""


@dataclass(frozen=True)
class Remat:
    """A checked policy."""

    policy: str
    names: tuple[str, ...] = ()
    in_scan: bool = True
    """The blocks run in a compiled loop, which keeps XLA from merging the recomputation with the forward pass (CSE). Without a loop CSE
    has to be prevented explicitly: it would silently undo the policy."""
    waits: str = "nothing"
    """What the backward pass recomputes only when the gradient of the block's result is there: block, mlp or nothing
    (planner/recompute.py: waits_for_gradient)."""

    @classmethod
    def resolve(cls, config: RematConfig, platform: str, in_scan: bool = True) -> Remat:
        """Check a config. Raises UserError for unknown policies and names, and for offload where there is no pinned host memory."""
        for keys, message in remat_problems(config.policy, config.names):
            raise UserError(f"{keys[0]}: {message}")
        if config.policy == "offload" and platform == "cpu":
            raise UserError("compute.remat.policy=offload needs host memory apart from device memory, which cpu has not; use names")
        return cls(config.policy, tuple(config.names), in_scan)

    @property
    def recomputes_blocks(self) -> bool:
        """Whether the backward pass runs the block again, except for what the policy saves."""
        return POLICIES[self.policy].recomputes_block

    def wrap_block(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the policy to the function of one block; where it waits, of its input and of the rest, which does not wait."""
        policies = jax.checkpoint_policies
        if not self.recomputes_blocks:
            return block
        if self.policy == "full":
            saved = policies.nothing_saveable
        elif self.policy == "dots":
            saved = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(GROUPED_MATMUL)
            )
        elif self.policy == "names":
            saved = policies.save_only_these_names(*self.names)
        else:
            saved = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=list(self.names), offload_src="device", offload_dst="pinned_host"
            )
        # Parameters do not wait with the residual stream: they are gathered in the iteration before.
        return jax.checkpoint(block, policy=saved, prevent_cse=(True, False) if self.waits == "block" else not self.in_scan)

    def wrap_mlp(self, mlp: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        """Apply the policy to the MLP alone, as a function of the residual stream after attention."""
        if self.waits != "mlp":
            return mlp
        return jax.checkpoint(mlp, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=(True,))

    def wrap_matmuls(self, matmuls: Callable[..., Any]) -> Callable[..., Any]:
        """Do not save matmul inputs that are elementwise functions of saved values: the backward pass recomputes them.

        Recomputing reads no more memory than loading the saved input would, and storing it is avoided. In a block that is recomputed as a
        whole there is nothing to save. What adapters save would need their matmuls, and their parameters' gathers, again.
        """
        if self.recomputes_blocks:
            return matmuls
        return jax.checkpoint(matmuls, policy=jax.checkpoint_policies.save_only_these_names(ADAPTER), prevent_cse=not self.in_scan)

    def wrap_attention(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the policy to attention alone."""
        if self.policy != "attention-only":
            return attention
        return jax.checkpoint(attention, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=not self.in_scan)
