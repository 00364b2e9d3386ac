"""The smallest change that fits: cheaper changes first, and none where none helps."""

import pytest

from ridgeline.configs.load import load
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.config_changes import fitting_changes
from ridgeline.planner.memory import memory_per_device

MODEL = ("models/llama-3.2-1b", ("data.seq_len=2048", "data.batch_size=64", "precision.compute=bfloat16", "mesh.fsdp=1"))


def config(policy="none"):
    return load(MODEL[0], (*MODEL[1], f"compute.remat.policy={policy}")).config


def sizes(**axes):
    return dict.fromkeys(MESH_AXES, 1) | axes


def applied(overrides, policy="none"):
    changed = load(MODEL[0], (*MODEL[1], f"compute.remat.policy={policy}", *overrides)).config
    mesh = {**sizes(data=8), **{axis: size for axis, size in changed.mesh.sizes.items() if any(f"mesh.{axis}=" in o for o in overrides)}}
    return memory_per_device(changed, mesh).total_bytes


def test_a_little_too_much_costs_only_microbatches():
    needed = memory_per_device(config(), sizes(data=8)).total_bytes
    overrides = fitting_changes(config(), sizes(data=8), int(0.9 * needed))
    assert overrides is not None and len(overrides) == 1 and overrides[0].startswith("trainer.accumulation=")


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5, 0.4])
def test_what_is_named_fits_by_the_same_model(share):
    capacity = int(share * memory_per_device(config(), sizes(data=8)).total_bytes)
    overrides = fitting_changes(config(), sizes(data=8), capacity)
    assert overrides is not None and applied(overrides) <= capacity


def test_state_that_is_too_large_is_sharded():
    """No recomputation shrinks the state: 12 bytes a parameter."""
    state = memory_per_device(config("full"), sizes(data=8)).argument_bytes
    overrides = fitting_changes(config("full"), sizes(data=8), int(0.9 * state))
    assert overrides is not None and any(o.startswith("mesh.fsdp=") for o in overrides)
    assert applied(overrides, "full") <= 0.9 * state


def test_microbatches_divide_the_rows_of_a_device():
    capacity = int(0.55 * memory_per_device(config(), sizes(data=8)).total_bytes)
    for overrides in (fitting_changes(config(), sizes(data=8), capacity), fitting_changes(config("full"), sizes(data=8), capacity)):
        counts = [int(o.partition("=")[2]) for o in overrides or [] if o.startswith("trainer.accumulation")]
        assert all(8 % count == 0 for count in counts)


def test_nothing_is_promised_where_nothing_helps():
    assert fitting_changes(config("full"), sizes(data=8), 10**9) is None
    assert fitting_changes(config("full"), sizes(fsdp=64), 10**6) is None


@pytest.mark.parametrize("expert", [1, 2, 4])
def test_changes_leave_whole_rows_to_each_device_also_over_expert(expert):
    """Devices of `expert` have rows of their own. Nothing fits into nothing: all changes are tried."""
    given = ["mesh.data=2", f"mesh.fsdp={8 // expert}", f"mesh.expert={expert}", "data.batch_size=64", "data.seq_len=1024"]
    before = load("models/mixtral-8x7b", given).config
    assert fitting_changes(before, before.mesh.sizes, 0) is None
    needed, found = memory_per_device(before, before.mesh.sizes).total_bytes, 0
    for share in (0.99, 0.9, 0.8, 0.7, 0.6):
        changes = fitting_changes(before, before.mesh.sizes, int(share * needed))
        if changes is not None:
            check_devices(load("models/mixtral-8x7b", [*given, *changes]).config, 16)
            found += 1
    assert found
