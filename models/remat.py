"""What the backward pass recomputes: named policies over the tagged values of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.schema import RematConfig

NAMES: dict[str, str] = {
    "block_input": "residual stream entering a block [B, T, D]",
    "query": "rotated queries [B, T, N, H]",
    "key": "rotated keys [B, T, K, H]",
    "value": "values [B, T, K, H]",
    "attention_context": "attention result before its output projection [B, T, N, H]",
    "attention_lse": "log-sum-exp of each attention row (chunked backend) [B, N, T]",
    "attention_out": "attention's update of the residual stream [B, T, D]",
    "mlp_gate": "gate projection before the activation [B, T, F]",
    "mlp_up": "up projection [B, T, F]",
    "mlp_out": "MLP's update of the residual stream [B, T, D]",
}
"""The values a block tags with `checkpoint_name`, for the policies `names` and `offload`."""

POLICIES: dict[str, str] = {
    "none": "everything is kept but norms and the products of gates, which are elementwise in what is kept",
    "full": "only each block's input is kept",
    "dots": "results of products with parameters are kept; attention and everything elementwise is recomputed",
    "attention-only": "only the attention itself (scores, softmax) is recomputed, from the kept queries, keys and values",
    "names": "only the values listed in compute.remat.names are kept",
    "offload": "the values listed in compute.remat.names are kept in host memory, nothing else",
}


@dataclass(frozen=True)
class Remat:
    """A resolved policy."""

    policy: str
    names: tuple[str, ...] = ()
    in_loop: bool = True
    """The blocks run inside a compiled loop, which by itself keeps XLA from merging the recomputation with the forward pass; where they do
    not, that merging (which would undo the policy without a word) has to be prevented."""

    @classmethod
    def resolve(cls, config: RematConfig, platform: str) -> Remat:
        """Check a config. Raises UserError for unknown policies and names, and for offload where there is no pinned host memory."""
        if config.policy not in POLICIES:
            raise unknown_name("rematerialisation policy (compute.remat.policy)", config.policy, POLICIES)
        for name in config.names:
            if name not in NAMES:
                raise unknown_name("checkpoint name (compute.remat.names)", name, NAMES)
        needs_names = config.policy in ("names", "offload")
        if needs_names and not config.names:
            raise UserError(f"compute.remat.policy {config.policy} needs compute.remat.names (allowed: {', '.join(NAMES)})")
        if config.names and not needs_names:
            raise UserError(f"compute.remat.names is read only by the policies names and offload, not by {config.policy}")
        if config.policy == "offload" and platform == "cpu":
            raise UserError("compute.remat.policy offload moves values from device to host memory, and on cpu they are the same; use names")
        return cls(config.policy, tuple(config.names))

    @property
    def recomputes_blocks(self) -> bool:
        """Whether the backward pass begins by running the block again, with whatever the policy did not keep."""
        return self.policy not in ("none", "attention-only")

    def wrap_block(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the policy to the function of one block."""
        policies = jax.checkpoint_policies
        if not self.recomputes_blocks:
            return block
        if self.policy == "full":
            saved = policies.nothing_saveable
        elif self.policy == "dots":
            saved = policies.dots_with_no_batch_dims_saveable
        elif self.policy == "names":
            saved = policies.save_only_these_names(*self.names)
        else:
            saved = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=list(self.names), offload_src="device", offload_dst="pinned_host"
            )
        return jax.checkpoint(block, policy=saved, prevent_cse=not self.in_loop)

    def wrap_products(self, products: Callable[..., Any]) -> Callable[..., Any]:
        """Keep no inputs of products that are elementwise in what is kept anyway: the backward pass computes those again.

        Reading what they are made of costs no more than reading them, and storing them is saved. A block that is recomputed as a whole
        has nothing stored to save.
        """
        if self.recomputes_blocks:
            return products
        return jax.checkpoint(products, prevent_cse=not self.in_loop)

    def wrap_attention(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the policy to the attention alone."""
        if self.policy != "attention-only":
            return attention
        return jax.checkpoint(attention, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=not self.in_loop)
