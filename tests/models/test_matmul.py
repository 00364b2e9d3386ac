"""Matmuls in the compute dtype: on CPUs in the element types with a fast kernel, with the values of any other."""

import jax
import jax.numpy as jnp
import pytest

from ridgeline.configs.schema import MeshConfig
from ridgeline.models.matmul.dense import matmul, weight_gradient
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner


@pytest.mark.parametrize(("mesh", "accumulated"), [({}, "f32"), ({"fsdp": 2}, "f32"), ({"tensor": 2}, "bf16")])
def test_bfloat16_matmuls_give_float32_unless_partial_sums_are_communicated(mesh, accumulated):
    config = MeshConfig(**mesh)
    devices = jax.devices()[: config.fsdp * config.tensor]
    partitioner = Partitioner(build_mesh(config, devices))
    x, w = jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    text = jax.jit(lambda x, w: matmul(partitioner, "btd,df->btf", x, w)).lower(x, w).as_text()
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert dot.endswith(f"-> tensor<4x8x32x{accumulated}>"), dot


def test_a_matmul_is_that_of_the_compute_dtype():
    partitioner = Partitioner.single()
    keys = jax.random.split(jax.random.key(0))
    for dtype in (jnp.float32, jnp.bfloat16):
        x, w = (jax.random.normal(key, (64, 64)).astype(dtype) for key in keys)
        y = matmul(partitioner, "td,df->tf", x, w)
        exact = jnp.einsum("td,df->tf", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
        assert y.dtype == dtype
        assert float(jnp.max(jnp.abs(y.astype(jnp.float32) - exact))) <= float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(exact)))


@pytest.mark.parametrize(("x_dims", "y_dims"), [("btd", "btf"), ("btd", "btnh"), ("btnh", "btd")])
def test_a_weight_gradient_in_float32_is_one_matmul_of_two_matrices_without_a_copy(x_dims, y_dims):
    sizes = {"b": 2, "t": 32, "d": 64, "f": 48, "n": 4, "h": 16}
    x, dy = (jax.random.normal(jax.random.key(i), [sizes[dim] for dim in dims]) for i, dims in enumerate((x_dims, y_dims)))
    equation = f"{x_dims},{y_dims}->{x_dims[2:]}{y_dims[2:]}"
    gradient = jax.jit(lambda x, dy: weight_gradient(Partitioner.single(), equation, x, dy, jnp.dtype("float32"))).lower(x, dy).compile()
    assert jnp.allclose(gradient(x, dy), jnp.einsum(equation, x, dy, precision="highest"), rtol=1e-5, atol=1e-4)
    assert "transpose(" not in gradient.as_text()


def test_a_weight_gradient_in_bfloat16_is_summed_in_the_gradient_dtype():
    x, dy = (jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i, shape in enumerate(((2, 32, 64), (2, 32, 48))))
    gradient = weight_gradient(Partitioner.single(), "btd,btf->df", x, dy, jnp.dtype("float32"))
    assert gradient.dtype == jnp.float32
    assert jnp.allclose(gradient, jnp.einsum("btd,btf->df", x.astype(jnp.float32), dy.astype(jnp.float32), precision="highest"), atol=1e-4)
