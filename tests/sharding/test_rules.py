"""The table of logical axes and its translator."""

import pytest
from jax.sharding import PartitionSpec as P

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MeshConfig
from ridgeline.sharding.rules import LOGICAL_AXES, PARAMETER_AXES, Rules, matrix_sides


def test_defaults_translate_parameters_and_activations():
    rules = Rules()
    assert rules.spec(("layers", "embed", "heads", "head_dim")) == P("pipeline", "fsdp", "tensor", None)
    assert rules.spec(("vocab", "embed")) == P("tensor", "fsdp")
    assert rules.spec(("batch", "residual_seq", "act_embed")) == P(("data", "fsdp"), ("context", "tensor"), None)
    assert rules.spec(("norm",)) == P(None)
    assert rules.spec((None, "mlp")) == P(None, "tensor")


def test_without_leaves_a_mesh_axis_out():
    assert Rules().spec(("embed", "mlp"), without=("fsdp",)) == P(None, "tensor")


def test_every_parameter_axis_is_a_row_of_the_table():
    assert set(LOGICAL_AXES) > PARAMETER_AXES


def test_overrides_replace_a_row():
    rules = Rules.from_config(MeshConfig(rules={"kv_heads": [], "norm": ["fsdp"]}))
    assert rules.spec(("kv_heads", "norm")) == P(None, "fsdp")
    assert rules.heads == ("tensor",)


def test_colliding_axes_are_refused_naming_both():
    with pytest.raises(UserError, match=r"'heads' and 'mlp' both map to mesh axis 'tensor'"):
        Rules().spec(("heads", "mlp"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embd": ["fsdp"]}, r"unknown logical axis in mesh.rules 'embd'; did you mean 'embed'"),
        ({"embed": ["fdsp"]}, r"unknown mesh axis in mesh.rules.embed 'fdsp'; did you mean 'fsdp'"),
        ({"embed": ["fsdp", "tensor"]}, r"mesh.rules.embed=.*'fsdp' must be the only"),
    ],
)
def test_bad_overrides_are_refused(rules, message):
    with pytest.raises(UserError, match=message):
        Rules.from_config(MeshConfig(rules=rules))


def test_an_unknown_logical_axis_is_refused():
    with pytest.raises(UserError, match=r"unknown logical axis 'head'; did you mean 'heads'"):
        Rules().spec(("head",))


def test_matrix_sides_group_head_dims_and_leave_out_layers():
    assert matrix_sides(("layers", "embed", "heads", "head_dim")) == [(1,), (2, 3)]
    assert matrix_sides(("kv_heads", "head_dim", "embed")) == [(0, 1), (2,)]
    assert matrix_sides(("layers", "heads", "head_dim")) == [(1, 2)]
    assert matrix_sides(("layers", "norm")) == [(1,)]
