"""Matmuls in the compute dtype, with the element types for which the platform has a fast kernel.

Legend: S rows and tokens as one dim, I input dims, O output dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner


def platform_of(partitioner: Partitioner) -> str:
    """Return the platform of the mesh's devices (cpu, gpu, rocm, tpu), which need not be present when compiling ahead of time."""
    mesh = partitioner.mesh
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    device = mesh.devices.flat[0]
    # JAX calls NVIDIA and AMD devices "gpu"; only the runtime's version text distinguishes them.
    rocm = device.platform == "gpu" and "rocm" in str(getattr(getattr(device, "client", None), "platform_version", "")).lower()
    return "rocm" if rocm else str(device.platform)


def matmul(partitioner: Partitioner, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return einsum(equation, a, b) in the dtype of a and b, accumulated in float32.

    On CPUs the result is computed in float32 and then rounded: the kernel that uses the matrix units supports only bfloat16 -> float32
    (jax 0.10; for a bfloat16 result XLA converts the operands to float32, which takes four times as long). The exception is a mesh with
    a `tensor` axis: there partial sums are communicated, and in the compute dtype they have half the bytes.
    """
    wide = platform_of(partitioner) == "cpu" and partitioner.mesh.shape["tensor"] == 1
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32 if wide else None).astype(a.dtype)


def weight_gradient(
    partitioner: Partitioner, equation: str, x: jax.Array, dy: jax.Array, dtype: jnp.dtype, tokens: str = "seq"
) -> jax.Array:
    """Return einsum(equation, x, dy) in `dtype`: the gradient of a parameter, summed over the rows and tokens both begin with.

    In float32, XLA's CPU backend copies x when two dims are contracted or several dims are left, and does not for a matmul of two
    matrices, so rows and tokens are merged to one dim. In bfloat16 it is fast only with two contracted dims. When the sequence is
    sharded (logical axis `tokens`), rows and tokens cannot be merged.
    """
    x_dims, _, y_dims = equation.partition("->")[0].partition(",")
    assert equation == f"{x_dims},{y_dims}->{x_dims[2:]}{y_dims[2:]}" and x_dims[:2] == y_dims[:2], equation
    if platform_of(partitioner) == "cpu" and x.dtype == jnp.float32 and partitioner.axis_size(tokens) == 1:
        x_SI, dy_SO = (a.reshape(a.shape[0] * a.shape[1], -1) for a in (x, dy))
        return jnp.einsum("si,so->io", x_SI, dy_SO, preferred_element_type=dtype).reshape(*x.shape[2:], *dy.shape[2:])
    return jnp.einsum(equation, x, dy, preferred_element_type=dtype)
