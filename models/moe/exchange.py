"""The exchange of tokens between the devices of `expert`: to the devices of their experts (dispatch), and results back (combine).

gather: every device receives every token of its group; the results are reduce-scattered.
all_to_all: a device receives each token that chose one of its experts once, whatever the number of these. With a capacity each pair of
devices has a buffer of that size. Without one, slices of any length are sent (`jax.lax.ragged_all_to_all`), and a device has room for
every token of its group, as with gather.

Either way a device has `slots` slots for the tokens of each device of its group; unused slots are 0. Over `tensor`, tokens that are sharded
along the sequence are gathered after they were sent over `expert`, and their results scattered before.

Legend: S tokens of a device, K experts per token, P devices of `expert`, N sent rows, G slots of a group, J copies of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ridgeline.models.backward_order import with_zeros
from ridgeline.planner.experts import peer_slots
from ridgeline.sharding.manual import active
from ridgeline.sharding.partition import Partitioner

AXIS = "expert"


class Slices(NamedTuple):
    """Slices of an array, one per device of `expert`, int32."""

    start_P: jax.Array
    size_P: jax.Array


class Route(NamedTuple):
    """Where the tokens of a device go, int32. gather: empty arrays, since every token goes everywhere."""

    token_N: jax.Array
    """Token in each row that is sent, those to one device next to each other; S for an unused row."""
    row_SJ: jax.Array
    """Rows of each token; N for none. J: a token goes to at most K devices."""
    # Without a capacity, else empty:
    rows: Slices
    """The rows to each device."""
    slots: Slices
    """The slots from each device."""
    to_P: jax.Array
    """Where on each device the slots from this one start."""
    from_P: jax.Array
    """Where on each device its rows to this one start."""


@dataclass(frozen=True)
class Exchange:
    """The exchange on one mesh. Hashable."""

    partitioner: Partitioner
    method: str
    """gather or all_to_all."""
    experts: int
    per_token: int
    capacity_factor: float | None
    ragged: bool = False
    """Whether the platform has the ragged collective; else it is computed with a padded one."""

    @property
    def groups(self) -> int:
        """Devices over which the experts are divided (P)."""
        return self.partitioner.axis_size("experts")

    @property
    def sources(self) -> int:
        """Devices whose tokens a device processes."""
        return self.groups * math.prod(self.partitioner.mesh.shape[axis] for axis in self._scattered)

    @property
    def moves_tokens(self) -> bool:
        """Whether tokens, or their gradients, go to other devices: over expert, or gathered over tensor."""
        return self.groups > 1 or bool(self._scattered)

    def route(self, expert_SK: jax.Array) -> Route:
        """Return the route of tokens to their experts; `experts` stands for a dropped assignment."""
        nothing = jnp.zeros(0, jnp.int32)
        if not self._sends:
            return Route(nothing, nothing, Slices(nothing, nothing), Slices(nothing, nothing), nothing, nothing)
        tokens, peers = expert_SK.shape[0], jnp.arange(self.groups)
        goes_SP = jnp.any((expert_SK // (self.experts // self.groups))[..., None] == peers, 1)
        sent_P = jnp.sum(goes_SP, 0, dtype=jnp.int32)
        rows = self._sent_rows(tokens)
        if self.capacity_factor is None:
            start_P = jnp.cumsum(sent_P) - sent_P
            slices = self._slices(sent_P, tokens)
        else:
            start_P = peers.astype(jnp.int32) * (rows // self.groups)
            slices = (Slices(nothing, nothing), Slices(nothing, nothing), nothing, nothing)
        row_SP = jnp.where(goes_SP, start_P + jnp.cumsum(goes_SP, 0, dtype=jnp.int32) - 1, rows)
        token_SP = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], row_SP.shape)
        token_N = jnp.full(rows, tokens, jnp.int32).at[row_SP].set(token_SP, mode="drop")
        return Route(token_N, jnp.sort(row_SP, 1)[:, : self.per_token], *slices)

    def dispatch(self, x_Sx: jax.Array, route: Route) -> jax.Array:
        """Return the tokens in the slots of the group, [G, ...]."""
        tokens = x_Sx.shape[0]
        if self._sends:
            x_Nx = x_Sx.at[route.token_N].get(mode="fill", fill_value=0)
            if self.capacity_factor is None and self.ragged:
                x_Sx = ragged_all_to_all((x_Nx.shape[0], self.groups * tokens), x_Nx, route.rows, route.slots, route.to_P, route.from_P)
            elif self.capacity_factor is None:
                x_Sx = padded_all_to_all(x_Nx, route.rows, tokens).reshape(-1, *x_Sx.shape[1:])  # the slots of a device start there too
            else:
                x_Sx = jax.lax.all_to_all(x_Nx, AXIS, 0, 0, tiled=True)
        elif self.groups > 1:
            x_Sx = jax.lax.all_gather(x_Sx, AXIS, axis=0, tiled=True)
        return jax.lax.all_gather(x_Sx, self._scattered, axis=0, tiled=True) if self._scattered else x_Sx

    def combine(self, y_Gx: jax.Array, route: Route) -> jax.Array:
        """Return the sum of each token's slots over the devices of its group, and over the shards of the hidden width, [S, ...]."""
        axes = active(self.partitioner, self.partitioner.rules.mesh_axes("mlp"))
        whole = tuple(axis for axis in axes if axis not in self._scattered)
        y_Gx = jax.lax.psum(y_Gx, whole) if whole else y_Gx
        y_Gx = jax.lax.psum_scatter(y_Gx, self._scattered, scatter_dimension=0, tiled=True) if self._scattered else y_Gx
        if not self._sends:
            return jax.lax.psum_scatter(y_Gx, AXIS, scatter_dimension=0, tiled=True) if self.groups > 1 else y_Gx
        if self.capacity_factor is None:
            sent = route.token_N.shape[0]
            if self.ragged:
                y_Nx = ragged_all_to_all((y_Gx.shape[0], sent), y_Gx, route.slots, route.rows, route.from_P, route.to_P)
            else:
                y_Nx = jnp.zeros((sent, *y_Gx.shape[1:]), y_Gx.dtype)
                y_Nx = padded_ragged_all_to_all(y_Gx, y_Nx, route.slots, route.rows, y_Gx.shape[0] // self.groups)
        else:
            y_Nx = jax.lax.all_to_all(y_Gx, AXIS, 0, 0, tiled=True)
        copies_SJx = y_Nx.at[route.row_SJ].get(mode="fill", fill_value=0)
        return jnp.sum(copies_SJx, 1, dtype=jnp.float32).astype(y_Gx.dtype)

    @property
    def _sends(self) -> bool:
        return self.method == "all_to_all" and self.groups > 1

    @property
    def _scattered(self) -> tuple[str, ...]:
        """Mesh axes that shard the sequence between blocks and not inside of them."""
        seq = self.partitioner.rules.mesh_axes("seq")
        return active(self.partitioner, tuple(axis for axis in self.partitioner.rules.mesh_axes("residual_seq") if axis not in seq))

    def _slices(self, sent_P: jax.Array, tokens: int) -> tuple[Slices, Slices, jax.Array, jax.Array]:
        """Return the slices of a route from the rows to each device."""
        me, sent_PP = jax.lax.axis_index(AXIS), jax.lax.all_gather(sent_P, AXIS)
        start_PP = jnp.cumsum(sent_PP, 1) - sent_PP
        rows = Slices(start_PP[me], sent_PP[me])
        slots = Slices(jnp.arange(self.groups, dtype=jnp.int32) * tokens, sent_PP[:, me])
        return rows, slots, jnp.full(self.groups, me * tokens, jnp.int32), start_PP[:, me]

    def _sent_rows(self, tokens: int) -> int:
        if self.capacity_factor is None:
            return tokens * min(self.per_token, self.groups)
        return self.groups * peer_slots(tokens, self.experts, self.per_token, self.groups, self.capacity_factor)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged_all_to_all(
    rows: tuple[int, int], x_Nx: jax.Array, sent: Slices, received: Slices, to_P: jax.Array, from_P: jax.Array
) -> jax.Array:
    """Send slices of x over `expert`; return the received ones in an array with 0 elsewhere. The gradient is sent back.

    XLA wrote the zeros for all exchanges of a turn at once, some outside of the loop over layers (gpt-oss, attention-only, data=2 x fsdp=2
    x tensor=2 x expert=4: 145.4 GB, 140.6 with zeros that are written when x is there).

    Args:
      rows: of x, and of the result.
      x_Nx: what is sent.
      sent: the slices of x to each device.
      received: the slices of the result from each device.
      to_P: where each sent slice starts at its receiver.
      from_P: where each received slice started at its sender.
    """
    x_Nx, out_Mx = with_zeros(x_Nx, jax.ShapeDtypeStruct((rows[1], *x_Nx.shape[1:]), x_Nx.dtype))
    return jax.lax.ragged_all_to_all(x_Nx, out_Mx, sent.start_P, sent.size_P, to_P, received.size_P, axis_name=AXIS)


def _send(rows: tuple[int, int], x_Nx: jax.Array, *places: Any) -> tuple[jax.Array, Any]:
    return ragged_all_to_all(rows, x_Nx, *places), places


def _send_back(rows: tuple[int, int], places: Any, dy_Mx: jax.Array) -> tuple[Any, ...]:
    sent, received, to_P, from_P = places
    return ragged_all_to_all((rows[1], rows[0]), dy_Mx, received, sent, from_P, to_P), None, None, None, None


ragged_all_to_all.defvjp(_send, _send_back)


def padded_all_to_all(x_Nx: jax.Array, sent: Slices, most: int) -> jax.Array:
    """Send slices of x over `expert`, padded with 0 to `most` rows; return the received ones, [P, most, ...]."""
    at = jnp.arange(most)
    from_PL = jnp.where(at < sent.size_P[:, None], sent.start_P[:, None] + at, x_Nx.shape[0])
    return jax.lax.all_to_all(x_Nx.at[from_PL].get(mode="fill", fill_value=0), AXIS, 0, 0, tiled=True)


def padded_ragged_all_to_all(x_Nx: jax.Array, out_Mx: jax.Array, sent: Slices, received: Slices, most: int) -> jax.Array:
    """`jax.lax.ragged_all_to_all` over `expert`, for backends without it (XLA's CPU backend): slices are padded to `most` rows.

    The received slices are in ascending order.
    """
    x_PLx = padded_all_to_all(x_Nx, sent, most)
    slot_M = jnp.arange(out_Mx.shape[0])
    source_M = jnp.searchsorted(received.start_P, slot_M, side="right", method="compare_all") - 1
    offset_M = slot_M - received.start_P[source_M]
    used_M = (source_M >= 0) & (offset_M < received.size_P[source_M])
    x_Mx = x_PLx.reshape(-1, *x_PLx.shape[2:])[source_M * most + offset_M.clip(max=most - 1)]
    return jnp.where(used_M.reshape(-1, *[1] * (x_Mx.ndim - 1)), x_Mx, out_Mx)
