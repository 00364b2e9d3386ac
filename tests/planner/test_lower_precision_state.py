"""A plan that does not fit says which narrower state would, and what it saves."""

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.config_changes import lower_precision_state, state_settings
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.plan import make_plan
from ridgeline.planner.search import capacity_bytes, search_scale
from ridgeline.planner.step_time import Machine

CLUSTER, CALIBRATION = load_cluster("dgx-h100").config, load_calibration(None)
BASE = ("data.seq_len=8192", "data.batch_size=64", "data.document_masking=false", "precision.compute=bfloat16")


def config(model, *overrides):
    return load(f"models/{model}", (*BASE, *overrides)).config


def test_405b_fits_on_64_gpus_with_narrow_state_only():
    wide = config("llama-3.1-405b")
    assert search_scale(wide, CLUSTER, CALIBRATION, 8, 1e12).best is None
    found = lower_precision_state(wide, CLUSTER, CALIBRATION, 8, 1e12)
    # Not `gradients`: those of the layers are stacked in the dtype of the parameters, whatever they are converted to.
    assert found is not None and found.settings["moments"] == "int8" and found.settings["params"] == "bfloat16"
    again = config("llama-3.1-405b", *found.overrides.split())
    layout = found.best.layout
    need = memory_per_device(layout.apply(again), layout.sizes).total_bytes
    assert need <= capacity_bytes(Machine(CLUSTER, CALIBRATION, 64))
    assert need + found.saved_bytes == memory_per_device(layout.apply(wide), layout.sizes).total_bytes


def test_the_least_narrow_state_that_fits_is_named_with_its_gain():
    with pytest.raises(
        UserError,
        match=r"Or optimizer\.offload=true, .* Or precision\.moments=int8 saves \d+\.\d GB per device and fits \(fsdp=16",
    ) as caught:
        make_plan(config("llama-3.1-70b"), CLUSTER, CALIBRATION, [2], tokens=1e12)
    assert "\n" not in str(caught.value)


def test_a_batch_that_does_not_divide_is_no_question_of_memory():
    with pytest.raises(UserError) as caught:
        make_plan(config("llama-3.2-1b", "data.batch_size=3"), CLUSTER, CALIBRATION, [2], tokens=1e9)
    assert "saves" not in str(caught.value)


@pytest.mark.parametrize(("kind", "moments"), [("adamw", "int8"), ("muon", "bfloat16"), ("adafactor", None)])
def test_what_is_tried_is_allowed_and_narrower(kind, moments):
    base = config("llama-3.2-1b", f"optimizer.kind={kind}")
    tried = list(state_settings(base))
    assert all(settings for settings in tried) and {settings.get("moments") for settings in tried} <= {moments, None}
    for settings in tried:
        config("llama-3.2-1b", f"optimizer.kind={kind}", *(f"precision.{key}={str(value).lower()}" for key, value in settings.items()))
    assert list(state_settings(base.model_copy(update={"precision": base.precision.model_copy(update=tried[-1])}))) == []
