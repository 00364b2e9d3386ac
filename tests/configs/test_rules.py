"""Rules between settings: each broken one is named with its keys and the nearest settings that work."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.problem import divisors
from ridgeline.configs.rules import SHARDED_OVER, check_config, check_devices, fit_devices
from ridgeline.configs.schema import Config
from ridgeline.sharding.rules import Rules


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model:\n  num_heads: 8\n  embed_dim: 256\ndata:\n  seq_len: 512\n")


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load("x.yaml", overrides)
    return str(caught.value)


MODULES = [
    ("model.mup={base_embed_dim: 64}", "model.mup", "null"),
    ("mesh.pipeline=2", "mesh.pipeline", "1"),
    ("precision.matmul=fp8", "precision.matmul", "compute"),
    ("precision.moments=int8", "precision.moments", "bfloat16"),
    ("compute.tensor_overlap=ring", "compute.tensor_overlap", "gather"),
    ("optimizer.kind=muon", "optimizer.kind", "adamw"),
]
"""Settings that do not work with modules of multi-token prediction: override, key, what works."""


@pytest.mark.parametrize(("override", "key", "works"), MODULES)
def test_what_does_not_work_with_multi_token_prediction_is_refused_by_name(override: str, key: str, works: str) -> None:
    refused = refusal("model.mtp_layers=1", override)
    assert f"{key}: does not support multi-token prediction; set {key}={works}, or model.mtp_layers=0" in refused


@pytest.mark.parametrize("override", ["preference.loss=dpo", "policy.loss=grpo", "distillation.weight=0.5", "lora.rank=4"])
def test_tuning_a_model_with_modules_of_multi_token_prediction_is_refused_with_the_way_to_leave_them_out(override: str) -> None:
    key, way = override.split("=")[0], "`ridge convert to-hf RUN DIR --without-mtp`, then init_from=DIR"
    refused = refusal("model.mtp_layers=1", override)
    assert f"{key}: does not support modules of multi-token prediction; set model.mtp_layers=0" in refused
    assert way in refused and f", or {key}=null" in refused


CASES = [
    # model
    (["loss.mtp_weight=0.1"], "loss.mtp_weight: there are no modules of multi-token prediction; set model.mtp_layers"),
    (["model.mtp_layers=512"], "model.mtp_layers: must be less than data.seq_len=512, got 512 (at most 511)"),
    (
        ["model.num_kv_heads=3"],
        "model.num_kv_heads: model.num_heads=8 must be a multiple of model.num_kv_heads=3 (num_kv_heads=2 or 4 works)",
    ),
    (
        ["model.embed_dim=250"],
        "model.embed_dim: model.embed_dim=250 must be a multiple of model.num_heads=8 (embed_dim=248 or 256 works, or set model.head_dim)",
    ),
    (["model.head_dim=33"], "model.head_dim: rotary embedding needs an even head width ... 33"),
    (["model.pad_vocab_to=31000"], "model.pad_vocab_to: must be at least model.vocab_size=32000, got 31000"),
    (["model.sliding_window=5000"], "model.sliding_window: must be at most model.max_seq_len=4096, got 5000 (null turns it off)"),
    (["data.seq_len=8192"], "data.seq_len: data.seq_len=8192 is longer than model.max_seq_len=4096"),
    (
        ["model.full_attention_every=2"],
        "must be at least 2 and needs model.sliding_window or model.attention_chunk, got 2 (null: all layers are alike)",
    ),
    (["model.full_attention_every=1", "model.sliding_window=8"], "model.full_attention_every: must be at least 2"),
    (["model.local_rope_theta=1e4"], "model.local_rope_theta: needs model.full_attention_every and model.position=rope"),
    (["model.attention_chunk=8", "model.sliding_window=8"], "model.attention_chunk: is in place of model.sliding_window; set one of them"),
    (["model.full_attention_rope=false"], "model.full_attention_rope: false needs model.full_attention_every and model.position=rope"),
    (["model.attention_temperature={}"], "model.attention_temperature: is of layers without rotary positions"),
    (["model.qk_norm_scale=false"], "model.qk_norm_scale: false needs model.qk_norm=true"),
    (
        ["model.attention_chunk=8", "compute.attention.backend=cudnn", "data.document_masking=false"],
        "compute.attention.backend: cudnn supports no chunks of 8 tokens ... set compute.attention.backend=pallas",
    ),
    (["model.moe={every: 2, dense_layers: 1}"], "model.moe.every: needs model.moe.dense_layers=0, got 1"),
    (["model.moe={every: 99}"], "model.moe.every: must be at most model.num_layers="),
    (["model.moe={every: 2}", "mesh.pipeline=2"], "mesh.pipeline: supports no dense layers between those with experts, model.moe.every=2"),
    (["model.rotary_fraction=0.3"], "model.rotary_fraction: rotary embedding needs an even head width after model.rotary_fraction, got 9"),
    (
        ["model.attention_softcap=50", "mesh.context=2", "compute.attention.context=ring"],
        "ring attention does not support soft-capping of scores; set compute.attention.context=all_to_all",
    ),
    (["model.rope_scaling={factor: 0.5}"], "model.rope_scaling.factor: must be at least 1, got 0.5"),
    (
        ["model.rope_scaling={low_freq_factor: 4.5}"],
        "model.rope_scaling.low_freq_factor: must be at most model.rope_scaling.high_freq_factor=4.0, got 4.5",
    ),
    (["model.rope_scaling={}", "model.position=learned"], "needs model.position=rope (null turns the scaling off)"),
    # data and start
    (
        ["data.train=[{path: a}, {path: b}]", "data.curriculum=[{step: 9, weights: [1]}]"],
        "data.curriculum.0.weights: must have one weight per corpus",
    ),
    (["data.curriculum=[{step: -1, weights: []}]"], "data.curriculum.0.step"),
    (["data.train=[{path: a}]", "data.curriculum=[{step: 9, weights: [-1]}]"], "data.curriculum.0.weights"),
    (["schedule.initial_fraction=0.1"], "schedule.initial_fraction: there is no warmup; set schedule.warmup_steps"),
    (["init_optimizer=true"], "init_optimizer: needs init_from"),
    # adapters
    (["lora.rank=4", "lora.targets=[querry]"], "lora.targets: unknown matrix 'querry'; did you mean 'query'?"),
    (["lora.rank=4", "lora.targets=[gate]", "model.gated_mlp=false"], "lora.targets: unknown matrix 'gate'"),
    (["lora.rank=4", "lora.targets=[up]", "model.moe={}"], "lora.targets: unknown matrix 'up'"),
    (["lora.rank=4", "lora.targets=[expert_up]"], "lora.targets: unknown matrix 'expert_up'"),
    (
        ["lora.rank=4", "lora.targets=[query, expert_up]", "model.moe={}", "lora.dora=true"],
        "lora.dora: does not support adapters of routed experts (expert_up); set lora.dora=false",
    ),
    (
        ["lora.rank=4", "lora.targets=[expert_down]", "model.moe={}", "lora.dropout=0.1"],
        "lora.dropout: does not support adapters of routed experts (expert_down); set lora.dropout=0",
    ),
    (["lora.rank=4", "lora.targets=[up, up]"], "lora.targets: names a matrix twice: up, up"),
    (["lora.rank=0"], "lora.rank: must be at least 1, got 0"),
    (["lora.rank=512"], "lora.rank: must be at most model.embed_dim=256, got 512; for full rank train without adapters"),
    (["lora.rank=4", "lora.dropout=1"], "lora.dropout: must be less than 1, got 1.0"),
    (["lora.alpha=4"], "lora.alpha: there are no adapters; set lora.rank, such as lora.rank=16"),
    (["lora.base=int8"], "lora.base: there are no adapters; set lora.rank, such as lora.rank=16"),
    (
        ["lora.rank=4", "mesh.pipeline=2", "trainer.accumulation=2"],
        "mesh.pipeline: does not support adapters; set mesh.pipeline=1",
    ),
    (["lora.rank=4", "precision.matmul=fp8"], "precision.matmul: does not support adapters; set precision.matmul=compute"),
    (["lora.rank=4", "precision.moments=int8"], "precision.moments: does not support adapters; set precision.moments=float32"),
    (
        ["lora.rank=4", "compute.tensor_overlap=ring"],
        "compute.tensor_overlap: does not support adapters; set compute.tensor_overlap=gather",
    ),
    (["lora.rank=4", "optimizer.kind=muon"], "optimizer.kind: does not support adapters; set optimizer.kind=adamw"),
    # experts
    (["model.moe={experts_per_token: 9}"], "model.moe.experts_per_token: must be at most model.moe.experts=8, got 9"),
    (["model.moe={dense_layers: 4}"], "model.moe.dense_layers: must be less than model.num_layers=4, got 4 (at most 3)"),
    (["model.moe={groups: 3}"], "model.moe.groups: model.moe.experts=8 does not divide into 3 groups (2 or 4 works)"),
    (["model.moe={groups: 4, groups_per_token: 5}"], "model.moe.groups_per_token: must be at most model.moe.groups=4, got 5"),
    (
        ["model.moe={groups: 4, experts_per_token: 3}"],
        "model.moe.experts_per_token: 1 groups have 2 experts, fewer than model.moe.experts_per_token=3 (groups_per_token=2 works)",
    ),
    (
        ["model.moe={scale_input: true}", "model.mlp_bias=true"],
        "model.moe.scale_input: true does not support biases of experts; set model.mlp_bias=false",
    ),
    (["model.moe={score: tanh}"], "model.moe.score: ... softmax ... sigmoid"),
    (["model.moe={expert: 4}"], "model.moe.expert: unknown key; did you mean 'experts'?"),
    (
        ["model.moe={}", "model.mlp_bias=true", "compute.experts.capacity_factor=1.25"],
        "compute.experts.capacity_factor: experts with biases drop no tokens; set capacity_factor=null",
    ),
    (["compute.experts.capacity_factor=1.25"], "compute.experts.capacity_factor: there are no experts: set it to null, or set model.moe"),
    (["model.moe={}", "precision.matmul=mxfp8"], "precision.matmul: mxfp8 does not support experts; set precision.matmul=fp8"),
    (["model.moe={}", "optimizer.kind=muon"], "optimizer.kind: muon does not support experts; use adamw, lion or sgd"),
    (["model.moe={}", "compute.tensor_overlap=ring"], "compute.tensor_overlap: ring does not support experts"),
    (["model.moe={dense_layers: 1}", "compute.scan_unroll=2"], "compute.scan_unroll: must divide model.moe.dense_layers=1, got 2"),
    (["model.moe={expert_dim: 36}", "mesh.tensor=8", "mesh.fsdp=1"], "model.moe.expert_dim=36 does not divide by mesh.tensor=8"),
    # mesh
    (["mesh.data=-1"], "mesh.data: only one mesh axis may be -1 ... mesh.data and mesh.fsdp"),
    (["mesh.tensor=0"], "mesh.tensor: must be at least 1, or -1 ... got 0"),
    # stages
    (
        ["mesh.pipeline=16", "model.num_layers=9"],
        "mesh.pipeline: model.num_layers=9 leaves a stage ... mesh.pipeline=16 (mesh.pipeline=9 works)",
    ),
    (["mesh.pipeline_chunks=2"], "mesh.pipeline_chunks: needs mesh.pipeline of 2 or more, got 2 (1: no chunks)"),
    (
        ["mesh.pipeline=2", "mesh.pipeline_chunks=2", "trainer.accumulation=3", "data.batch_size=6"],
        "mesh.pipeline_chunks: needs trainer.accumulation to be a multiple of mesh.pipeline=2, got 3 (4 works)",
    ),
    (["mesh.pipeline=2", "data.seq_len=511"], "mesh.pipeline: data.seq_len=511 does not divide by 2, ... (data.seq_len=512 works)"),
    (
        ["mesh.pipeline=2", "compute.remat={policy: offload, names: [block_input]}"],
        "compute.remat.policy: offload does not go with mesh.pipeline=2; set compute.remat.policy=full",
    ),
    (["mesh.pipeline=2", "mesh.rules={layers: []}"], "mesh.rules.layers: cannot be changed with mesh.pipeline=2; remove it, or "),
    (
        ["mesh.pipeline=2", "model.moe={dense_layers: 1}"],
        "mesh.pipeline: supports no dense layers before those with experts, model.moe.dense_layers=1 (set mesh.pipeline=1)",
    ),
    # a sequence sharded over context
    (
        ["mesh.context=4", "data.seq_len=500", "compute.attention.context=ring"],
        "mesh.context: ... data.seq_len=500 ... 2 x mesh.context=4 ... (data.seq_len=496 works)",
    ),
    (
        ["mesh.context=16", "compute.attention.context=all_to_all"],
        "mesh.context: model.num_heads=8 ... mesh.context=16, ... set it to ring",
    ),
    (
        ["mesh.context=2", "compute.attention.backend=xla", "compute.attention.context=ring"],
        "compute.attention.backend: xla has no kernel for ring attention over mesh.context=2; ... context=all_to_all",
    ),
    (["mesh.context=2", "mesh.rules={residual_seq: []}"], "mesh.rules.residual_seq: cannot be changed with mesh.context=2"),
    (
        ["mesh.context=2", "compute.attention.context=rings"],
        "compute.attention.context: unknown context method 'rings'; did you mean 'ring'?",
    ),
    (["compute.attention.backend=cudnn"], "compute.attention.backend: cudnn supports no packed documents; ... document_masking=false"),
    (["mesh.zero_stage=2", "model.moe={}"], "mesh.zero_stage: does not support experts; set mesh.zero_stage=0, or"),
    (["mesh.expert=4"], "mesh.expert: the model has no experts, so only 1 is supported, got 4 (or set model.moe)"),
    (["mesh.expert=3", "model.moe={}"], "mesh.expert: model.moe.experts=8 does not divide by mesh.expert=3 (mesh.expert=2 or 4 works"),
    (["mesh.zero_stage=1"], "mesh.zero_stage: must be 0 or 2, got 1"),
    (["mesh.zero_stage=2", "optimizer.kind=muon"], "mesh.zero_stage: muon needs whole matrices; set mesh.zero_stage=0, or "),
    (
        ["mesh.zero_stage=2", "mesh.rules={embed: []}"],
        "mesh.zero_stage: supports only the default rule of `embed`; remove mesh.rules.embed",
    ),
    (
        ["mesh.zero_stage=2", "mesh.data=3", "data.batch_size=6"],
        "mesh.data: model.embed_dim=256 does not divide by mesh.data=3 (mesh.data=2 or 4 works, or model.embed_dim=255 or 258 works)",
    ),
    (
        ["mesh.rules={embed: [fdsp]}"],
        "mesh.rules.embed: unknown mesh axis 'fdsp'; did you mean 'fsdp'? (allowed: context, data, expert, fsdp, pipeline, tensor)",
    ),
    # divisibility over tensor and fsdp
    (
        ["mesh.tensor=16", "model.num_heads=24", "model.head_dim=16"],
        "mesh.tensor: model.num_heads=24 does not divide by mesh.tensor=16 (mesh.tensor=12 or 24 works, or model.num_heads=16 or 32 works)",
    ),
    (
        ["mesh.tensor=4", "model.num_kv_heads=2"],
        "mesh.tensor: model.num_kv_heads=2 does not divide by mesh.tensor=4 (mesh.tensor=2 works, or model.num_kv_heads=4 works)",
    ),
    (
        ["mesh.tensor=8", "model.mlp_dim=1020"],
        "mesh.tensor: model.mlp_dim=1020 does not divide by mesh.tensor=8 (mesh.tensor=6 or 10 works, or model.mlp_dim=1016 or 1024 works)",
    ),
    (
        ["mesh.tensor=8", "model.vocab_size=50257"],
        "mesh.tensor: model.vocab_size=50257 does not divide by mesh.tensor=8 (set model.pad_vocab_to=50264)",
    ),
    (
        ["mesh.fsdp=7", "data.batch_size=7"],
        "mesh.fsdp: model.embed_dim=256 does not divide by mesh.fsdp=7 (mesh.fsdp=4 or 8 works, or model.embed_dim=252 or 259 works)",
    ),
    (
        ["mesh.tensor=8", "data.seq_len=500"],
        "mesh.tensor: data.seq_len=500 does not divide by mesh.tensor=8 (mesh.tensor=5 or 10 works, or data.seq_len=496 or 504 works)",
    ),
    # batch
    (
        ["trainer.accumulation=3"],
        "trainer.accumulation: data.batch_size=8 does not divide by trainer.accumulation=3 "
        "(data.batch_size=6 or 9 works, or trainer.accumulation=2 or 4)",
    ),
    (
        ["data.batch_size=12", "mesh.fsdp=4", "mesh.data=2"],
        "data.batch_size: 12 rows per microbatch "
        "(data.batch_size=12 / trainer.accumulation=1) do not divide by mesh.data=2 x mesh.fsdp=4 (data.batch_size=8 or 16 works)",
    ),
    (
        ["data.batch_size=16", "trainer.accumulation=4", "mesh.fsdp=8"],
        "data.batch_size: 4 rows per microbatch (data.batch_size=16 / trainer.accumulation=4) do not divide by mesh.fsdp=8 "
        "(data.batch_size=32 works)",
    ),
    (["evaluation.batch_size=6", "mesh.fsdp=4"], "evaluation.batch_size: 6 rows do not divide by mesh.fsdp=4 (4 or 8 works)"),
    # compute
    (["compute.scan_unroll=3"], "compute.scan_unroll: must divide model.num_layers=4, got 3 (2 or 4 works)"),
    (["compute.remat.policy=names"], "compute.remat.policy: 'names' needs compute.remat.names (allowed: block_input, query, "),
    (["compute.remat.policy=offload"], "compute.remat.policy: 'offload' needs compute.remat.names (allowed: block_input, "),
    (
        ["compute.remat.policy=names", "compute.remat.names=[mlp_outt]"],
        "compute.remat.names: unknown value to save 'mlp_outt'; did you mean 'mlp_out'?",
    ),
    (
        ["compute.remat.names=[mlp_out]"],
        "compute.remat.names: only the policies names and offload use compute.remat.names, not none (set it to [])",
    ),
    # steps
    (["precision.matmul=fp8", "compute.tensor_overlap=ring"], "compute.tensor_overlap: ... precision.matmul=compute"),
    (["mesh.rules={kv_heads: []}", "compute.tensor_overlap=ring"], "compute.tensor_overlap: ... mesh.rules"),
    (["precision.matmul=mxfp8", "model.mlp_dim=1000"], "precision.matmul: mxfp8 ... multiples of 32 ... model.mlp_dim is 1000"),
    (["precision.matmul=nvfp4", "precision.compute=float32"], "precision.matmul: nvfp4 ... precision.compute=bfloat16"),
    (["schedule.warmup_steps=2000"], "schedule.warmup_steps: schedule.warmup_steps=2000 is more than trainer.steps=1000"),
    (["trainer.steps=8", "schedule.warmup_steps=20"], "schedule.warmup_steps=20 is more than trainer.steps=8"),
    (
        ["schedule.kind=wsd", "schedule.warmup_steps=600", "schedule.decay_fraction=0.5"],
        "schedule.decay_fraction: ... 600 steps ... 0.5 of 1000 ... schedule.decay_fraction ... 0.4",
    ),
    (["profiler.start_step=1000"], "profiler.start_step: must be less than trainer.steps=1000, got 1000"),
    (["checkpoint.keep_every=700"], "checkpoint.keep_every: must be a multiple of checkpoint.every=500, got 700 (500 or 1000 works)"),
    (
        ["checkpoint.keep_every=700", "checkpoint.every=0"],
        "checkpoint.keep_every: must be a multiple of checkpoint.every=0, got 700 (0 turns it off)",
    ),
    (["checkpoint.keep_best=2"], "checkpoint.keep_best: needs an evaluation set"),
    (["checkpoint.keep_best=2", "evaluation.sets={a: x}", "checkpoint.best_set=b"], "checkpoint.best_set: ... 'b' ... (sets: a)"),
    (["checkpoint.copy_to=bucket/run"], "checkpoint.copy_to: must be a URL such as s3://bucket/run, got 'bucket/run'"),
    (
        ["checkpoint.local.directory=/tmp/x", "checkpoint.local.every=500"],
        "checkpoint.local.every: must be less than checkpoint.every=500, got 500",
    ),
    # evaluation
    (["evaluation.every=10"], "evaluation.every: ... evaluation.sets ... evaluation.every=0"),
    (["evaluation.sets={a: x, b: x}"], "evaluation.sets.b: ... same directory as evaluation.sets.a: x"),
    # runtime
    (
        ["runtime.cpu_devices=8", "runtime.platform=cuda"],
        "runtime.cpu_devices: ... runtime.platform is cuda (set it to cpu, or cpu_devices to 1)",
    ),
    # names
    (
        ["compute.attention.backend=flash"],
        "compute.attention.backend: unknown attention backend 'flash' (allowed: auto, chunked, cudnn, pallas, reference, xla)",
    ),
    (
        ["optimizer.kind=adam"],
        "optimizer.kind: unknown optimizer 'adam'; did you mean 'adamw'? (allowed: adafactor, adamw, lion, muon, sgd)",
    ),
    (["schedule.kind=cosin"], "schedule.kind: unknown schedule 'cosin'; did you mean 'cosine'? (allowed: constant, cosine, linear, wsd)"),
    (
        ["compute.remat.policy=ful"],
        "compute.remat.policy: unknown remat policy 'ful'; did you mean 'full'? "
        "(allowed: attention-only, dots, full, names, none, offload)",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), CASES)
def test_a_broken_rule_names_its_keys_and_what_works(overrides: list[str], expected: str) -> None:
    message = refusal(*overrides)
    assert all(fact in message for fact in expected.split(" ... "))
    assert message.startswith("override '")
    assert "\n" not in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_kv_heads=4", "mesh.tensor=4"],
        ["model.head_dim=33", "model.position=learned"],
        ["mesh.tensor=8", "model.vocab_size=50257", "model.pad_vocab_to=50264"],
        ["mesh.tensor=8", "model.vocab_size=50257", "mesh.rules={vocab: []}"],
        ["schedule.warmup_steps=1000"],
        ["schedule.kind=wsd", "schedule.warmup_steps=500", "schedule.decay_fraction=0.5"],
        ["compute.scan_unroll=3", "compute.scan_layers=false"],
        ["compute.remat.policy=names", "compute.remat.names=[mlp_out]"],
        ["checkpoint.keep_every=1500"],
        ["data.batch_size=32", "trainer.accumulation=4", "mesh.fsdp=8"],
        ["checkpoint.every=0", "checkpoint.final=false"],
        ["checkpoint.local.every=500"],
        ["checkpoint.local.directory=/tmp/x", "checkpoint.every=0"],
        ["checkpoint.keep_best=2", "evaluation.sets={a: x}", "checkpoint.best_set=a"],
    ],
)
def test_what_is_allowed_is_not_refused(overrides: list[str]) -> None:
    load("x.yaml", overrides)


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        (
            "model: {sliding_window: 2048, max_seq_len: 4096}",
            ["model.max_seq_len=1024"],
            "override 'model.max_seq_len=1024': model.sliding_window: must be at most model.max_seq_len=1024, got 2048",
        ),
        (
            "mesh: {pipeline: 2}",
            ["lora.rank=8"],
            "override 'lora.rank=8': mesh.pipeline: does not support adapters; set mesh.pipeline=1",
        ),
        (
            "optimizer: {kind: lion}",
            ["precision.moments=int8"],
            "override 'precision.moments=int8': precision.moments: int8 moments need AdamW",
        ),
        (
            "model: {max_seq_len: 1024}",
            ["model.sliding_window=2048"],
            "override 'model.sliding_window=2048': model.sliding_window: must be at most model.max_seq_len=1024, got 2048",
        ),
    ],
)
def test_what_a_message_is_about_is_named_whichever_key_broke_the_rule(file: str, overrides: list[str], expected: str) -> None:
    Path("y.yaml").write_text(f"{file}\n")
    with pytest.raises(UserError, match=re.escape(expected)):
        load("y.yaml", overrides)


def test_a_rule_between_file_and_default_blames_the_line_in_the_file() -> None:
    Path("y.yaml").write_text("seed: 1\nmodel:\n  max_seq_len: 512\n")
    with pytest.raises(UserError, match=r"^y.yaml:3: model.max_seq_len: data.seq_len=1024 is longer than model.max_seq_len=512"):
        load("y.yaml")


def test_a_rule_about_a_name_with_dots_finds_its_line() -> None:
    Path("y.yaml").write_text("evaluation:\n  sets:\n    a: d\n    wiki.v2: d\n")
    with pytest.raises(UserError, match=r"^y.yaml:4: evaluation.sets.wiki.v2: .*same directory as evaluation.sets.a: d$"):
        load("y.yaml")


def make(**mesh: int) -> Config:
    return Config.model_validate({"mesh": mesh, "model": {"num_heads": 8, "embed_dim": 256}, "data": {"batch_size": 16}})


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({}, 8, {"fsdp": 8}),
        ({"tensor": 2}, 8, {"fsdp": 4, "tensor": 2}),
        ({"data": -1, "fsdp": 2}, 8, {"data": 4, "fsdp": 2}),
        ({"fsdp": 1}, 1, {}),
    ],
)
def test_the_free_axis_takes_the_devices_that_are_left(mesh: dict[str, int], devices: int, expected: dict[str, int]) -> None:
    sizes = check_devices(make(**mesh), devices)
    assert {axis: size for axis, size in sizes.items() if size != 1} == expected


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({"fsdp": 4}, 8, "mesh.fsdp=4 does not match 8 devices; set mesh.data=2 or mesh.fsdp=8"),
        ({"fsdp": 1, "tensor": 3}, 8, "mesh.tensor=3 does not match 8 devices; set mesh.tensor=8"),
        ({"tensor": 3}, 8, "mesh.tensor=3 does not divide 8 devices; set mesh.tensor=4 or mesh.tensor=2"),
        ({"data": 16}, 8, "mesh.data=16 does not divide 8 devices; set mesh.data=8 or mesh.data=4"),
        (
            {},
            3,
            "mesh.fsdp: model.embed_dim=256 does not divide by mesh.fsdp=3 "
            "(mesh.fsdp=2 or 4 works, or model.embed_dim=255 or 258 works) (on 3 devices) (and 1 more: data.batch_size)",
        ),
        (
            {},
            32,
            "data.batch_size: 16 rows per microbatch (data.batch_size=16 / trainer.accumulation=1) do not divide by mesh.fsdp=32 "
            "(data.batch_size=32 works) (on 32 devices)",
        ),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(mesh: dict[str, int], devices: int, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_devices(make(**mesh), devices)
    assert str(caught.value) == expected


def test_rules_that_need_the_devices_wait_for_them() -> None:
    config = make(data=-1, fsdp=1)
    assert check_config(config) == []
    with pytest.raises(UserError, match=r"do not divide by mesh\.data=32"):
        check_devices(config, 32)


def test_block_scaled_products_wait_for_parameters_that_tensor_does_not_cut() -> None:
    config = make(fsdp=2, tensor=2)
    narrow = config.model_copy(update={"precision": config.precision.model_copy(update={"matmul": "mxfp8"})})
    check_devices(config, 4)
    with pytest.raises(UserError, match=r"^mesh\.tensor: mxfp8 .*set mesh\.tensor=1, or precision\.matmul=fp8"):
        check_devices(narrow, 4)


def test_the_divisibility_table_agrees_with_the_sharding_rules() -> None:
    for logical, axes in SHARDED_OVER.items():
        assert getattr(Rules(), logical) == axes, logical


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(49) == [1, 7, 49]


@pytest.mark.parametrize(
    ("mesh", "model", "batch_size", "devices", "fitted"),
    [
        ({}, {}, 8, 8, {"fsdp": 8}),
        ({}, {}, 8, 6, {"fsdp": 4}),
        ({"fsdp": 4, "tensor": 2}, {}, 8, 8, {"fsdp": 4, "tensor": 2}),
        ({"fsdp": 4, "tensor": 2}, {}, 8, 4, {"fsdp": 2, "tensor": 2}),
        ({"data": 8, "fsdp": 8, "tensor": 8}, {}, 64, 8, {"tensor": 8}),
        ({"fsdp": 2}, {}, 8, 8, {"fsdp": 2}),
        ({}, {}, 3, 8, {}),
        ({}, {"embed_dim": 31, "num_heads": 1, "head_dim": 8}, 8, 8, {}),
    ],
)
def test_the_largest_mesh_that_fits_is_a_part_of_the_configured_one(mesh, model, batch_size, devices, fitted) -> None:
    shapes = {"embed_dim": 256, "num_heads": 8, "mlp_dim": 256, "vocab_size": 512, **model}
    config = Config.model_validate({"mesh": mesh, "model": shapes, "data": {"batch_size": batch_size}})
    found = fit_devices(config, devices)
    assert {axis: size for axis, size in found.mesh.sizes.items() if size > 1} == fitted
    check_devices(found, int(np.prod(list(found.mesh.sizes.values()))))
