"""Products of activations and parameters, in the form that the platform has a quick kernel for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

if TYPE_CHECKING:
    from sharding.partition import Partitioner


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
