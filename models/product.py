"""Products of activations and parameters, in the form that the platform has a quick kernel for."""

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
    # JAX calls NVIDIA and AMD devices "gpu"; only the runtime's version text tells them apart.
    rocm = device.platform == "gpu" and "rocm" in str(getattr(getattr(device, "client", None), "platform_version", "")).lower()
    return "rocm" if rocm else str(device.platform)


def product(partitioner: Partitioner, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return einsum(equation, a, b) in the dtype of a and b, accumulated in float32.

    On CPUs the kernel that uses the matrix units gives float32 from bfloat16 and nothing else (jax 0.10; asked for bfloat16, XLA converts
    the operands to float32 and takes four times as long), so the result is rounded after it. Not where `tensor` cuts what is summed over:
    there partial sums travel, and in half the bytes.
    """
    wide = platform_of(partitioner) == "cpu" and partitioner.mesh.shape["tensor"] == 1
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32 if wide else None).astype(a.dtype)


def weight_gradient(partitioner: Partitioner, equation: str, x: jax.Array, dy: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return einsum(equation, x, dy) in `dtype`: the gradient of a parameter, summed over the rows and tokens both begin with.

    XLA's CPU backend copies x to sum over two dims in float32, or where more than one dim of it is left; a plain product of two matrices
    it takes as it is. In bfloat16 it is quick only with two dims to sum over. Where the tokens of a row are cut over devices, rows and
    tokens do not make one dim.
    """
    x_dims, _, y_dims = equation.partition("->")[0].partition(",")
    assert equation == f"{x_dims},{y_dims}->{x_dims[2:]}{y_dims[2:]}" and x_dims[:2] == y_dims[:2], equation
    if platform_of(partitioner) == "cpu" and x.dtype == jnp.float32 and partitioner.axis_size("seq") == 1:
        x_SI, dy_SO = (a.reshape(a.shape[0] * a.shape[1], -1) for a in (x, dy))
        return jnp.einsum("si,so->io", x_SI, dy_SO, preferred_element_type=dtype).reshape(*x.shape[2:], *dy.shape[2:])
    return jnp.einsum(equation, x, dy, preferred_element_type=dtype)
