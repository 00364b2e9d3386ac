"""On CPUs products of bfloat16 ask for the float32 that the quick kernel gives, except where partial sums travel."""

import jax
import jax.numpy as jnp
import pytest

from configs.schema import MeshConfig
from models.product import product
from sharding.mesh import build_mesh
from sharding.partition import Partitioner


@pytest.mark.parametrize(("mesh", "accumulated"), [({}, "f32"), ({"fsdp": 2}, "f32"), ({"tensor": 2}, "bf16")])
def test_bfloat16_products_leave_the_kernel_in_float32_unless_partial_sums_travel(mesh, accumulated):
    config = MeshConfig(**mesh)
    devices = jax.devices()[: config.fsdp * config.tensor]
    partitioner = Partitioner(build_mesh(config, devices))
    x, w = jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    text = jax.jit(lambda x, w: product(partitioner, "btd,df->btf", x, w)).lower(x, w).as_text()
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert dot.endswith(f"-> tensor<4x8x32x{accumulated}>"), dot


def test_a_product_is_that_of_the_compute_dtype():
    partitioner = Partitioner.single()
    keys = jax.random.split(jax.random.key(0))
    for dtype in (jnp.float32, jnp.bfloat16):
        x, w = (jax.random.normal(key, (64, 64)).astype(dtype) for key in keys)
        y = product(partitioner, "td,df->tf", x, w)
        exact = jnp.einsum("td,df->tf", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
        assert y.dtype == dtype
        assert float(jnp.max(jnp.abs(y.astype(jnp.float32) - exact))) <= float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(exact)))
