"""A matmul of two float8 tiles inside of a Pallas kernel, on the 8-bit tensor cores of NVIDIA GPUs.

Pallas's own dot refuses operands of two float8 dtypes, and Triton multiplies two of one dtype in 16 bits unless imprecise sums are allowed:
the sums of one instruction keep about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). This one allows them within a tile; the sums
of the tiles are added in float32. The tensor cores of Hopper read float8 only with the contracted dim last, so tiles of arrays that lie
otherwise would be transposed byte by byte: callers pass transposed copies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ridgeline.configs.errors import UserError

_dot_p = Primitive("float8_dot")


def float8_dot(a_MK: jax.Array, b_KN: jax.Array, total_MN: jax.Array) -> jax.Array:
    """Return total + a b in float32. Kernels that are not interpreted call `lower_for_gpus` first."""
    total: jax.Array = _dot_p.bind(a_MK, b_KN, total_MN)
    return total


@cache
def lower_for_gpus() -> None:
    """Make Pallas lower `float8_dot` for GPUs; raises UserError where this JAX cannot."""
    try:
        # Internals of JAX, the same in 0.10 and 0.12: Pallas has no public way to add a primitive. Imported only here, because other
        # versions and installs without GPUs may lack them, and need them for nothing else.
        from jax._src.lib.triton import dialect
        from jax._src.pallas.triton.lowering import register_lowering
    except ImportError as error:
        raise UserError(f"precision.matmul: JAX {jax.__version__} compiles no 8-bit experts; set precision.matmul=compute") from error

    def in_triton(context: Any, a_MK: Any, b_KN: Any, total_MN: Any) -> Any:
        return dialect.dot(a_MK, b_KN, total_MN, max_num_imprecise_acc=context.avals_in[0].shape[1])

    register_lowering(_dot_p)(in_triton)


def _in_float32(a_MK: jax.Array, b_KN: jax.Array, total_MN: jax.Array) -> jax.Array:
    return total_MN + jnp.dot(a_MK.astype(jnp.float32), b_KN.astype(jnp.float32))


_dot_p.def_abstract_eval(lambda a_MK, b_KN, total_MN: total_MN)
mlir.register_lowering(_dot_p, mlir.lower_fun(_in_float32, multiple_results=False))  # Pallas's interpreter
