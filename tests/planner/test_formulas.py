"""Formulas of --explain: evaluated, they give the values of the plan."""

import math
import random

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.formulas import formulas, memory_formulas
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.plan import make_plan

CONSTANTS = {"fragmentation", "margin", "runtime_reserve"}
"""Components that are fractions of others, or do not depend on the model."""
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-7b")


@pytest.mark.parametrize("seed", range(30))
def test_the_formulas_of_the_memory_give_its_bytes(seed):
    draw = random.Random(seed)
    sizes = {"data": draw.choice([1, 2, 8]), "fsdp": draw.choice([1, 4, 16]), "tensor": draw.choice([1, 2, 4])}
    accumulation = draw.choice([1, 2, 4])
    listed = [("names", ["query", "mlp_up"]), ("offload", ["block_input"])]
    policy, names = draw.choice([*((policy, []) for policy in ("none", "attention-only", "dots", "full")), *listed])
    optimizer = draw.choice(["adamw", "lion", "sgd", "muon", "adafactor"])
    config = load(
        f"models/{draw.choice(MODELS)}",
        [
            f"data.batch_size={sizes['data'] * sizes['fsdp'] * accumulation * draw.choice([1, 2])}",
            f"data.seq_len={draw.choice([1024, 4096])}",
            f"data.document_masking={draw.choice(['true', 'false'])}",
            f"trainer.accumulation={accumulation}",
            f"compute.remat.policy={policy}",
            f"compute.remat.names=[{','.join(names)}]",
            f"optimizer.kind={optimizer}",
            f"mesh.zero_stage={0 if optimizer == 'muon' else draw.choice([0, 2])}",
            f"precision.gradients={draw.choice(['float32', 'bfloat16'])}",
        ],
    ).config
    found, symbols = memory_formulas(config, sizes, gpu=True)
    planned = memory_per_device(config, sizes).components
    assert {formula.name: formula.value for formula in found} == {name: part.bytes for name, part in planned.items()}
    values = {symbol.name: symbol.value for symbol in symbols}
    assert all(symbol.meaning for symbol in symbols)
    written = {formula.name: formula.text for formula in found if formula.text}
    assert {name: eval(text, {}, values) for name, text in written.items()} == {name: planned[name].bytes for name in written}
    plain = {name for name, part in planned.items() if part.bytes and name not in written}
    assert plain <= CONSTANTS | ({"moments", "gradients", "parameter_copies"} if config.optimizer.kind in ("adafactor", "muon") else set())
    assert {"parameters", "activations", "loss"} & set(written)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize(("cluster", "nodes"), [("dgx-h100", 2), ("mn5-acc", 16)])
def test_the_formulas_of_the_run_give_its_cost(cluster, nodes, asynchronous):
    config = load("models/llama-3.1-8b", ["data.batch_size=512", f"checkpoint.asynchronous={asynchronous}"]).config
    made = make_plan(config, load_cluster(cluster).config, load_calibration(None), [nodes], tokens=1e11)
    found = formulas(made)
    values = {symbol.name: symbol.value for symbol in found.symbols} | {"ceil": math.ceil, "sqrt": math.sqrt, "max": max}
    run = made.best[0].run
    for formula in found.run:
        values[formula.name] = eval(formula.text, {}, values)
        assert values[formula.name] == pytest.approx(formula.value, rel=1e-9), formula.name
    assert {formula.name for formula in found.run} >= {"steps", "wall_days", "goodput", "energy_kwh"}
    assert ("wall_cost_usd" in values) == (run.wall_cost_usd is not None)
    assert sum(formula.value for formula in found.step) == pytest.approx(made.best[0].step.step_s)
