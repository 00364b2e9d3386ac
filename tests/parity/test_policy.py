"""Losses of policy updates, their gradients and metrics against TRL's GRPOTrainer on the same tiny Llama and random rollouts."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ridgeline.configs.tuning_schema import PolicyConfig
from ridgeline.models.policy import ADVANTAGES, OLD, REFERENCE, advantages, token_shares
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.step import policy_sums, to_global
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import LLAMA, Variant, load_theirs, save_random_model
from tests.parity.test_preference import compare_gradients, on_one_device

pytestmark = pytest.mark.parity
ROWS, PROMPT, COMPLETION, VOCAB = 8, 5, 12, 97
KL, LOW, HIGH = 0.3, 0.15, 0.25


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A model in both libraries, TRL's trainer of it, and random rollouts."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tests.loaders.chats import write_chat_tokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    base = tmp_path_factory.mktemp("grpo")
    write_chat_tokenizer(base / "tokenizer", "chatml")
    save_random_model(Variant("llama", LLAMA | {"num_key_value_heads": 2}), base / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    options = {"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    arguments = GRPOConfig(
        output_dir=str(base / "out"),
        beta=KL,
        epsilon=LOW,
        epsilon_high=HIGH,
        max_completion_length=COMPLETION,
        num_generations=4,
        per_device_train_batch_size=ROWS,
        **options,
    )
    trainer = GRPOTrainer(
        load_theirs(base / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * ROWS),
        processing_class=tokenizer,
    )
    trainer.model.eval()  # no dropout; its metrics are those of an evaluation
    return base / "model", trainer


@pytest.mark.parametrize(("loss", "unbiased"), [("grpo", False), ("dr_grpo", True), ("dapo", False), ("dapo", True)])
def test_loss_gradients_and_metrics_equal_those_of_trl(loss, unbiased, setting, tmp_path):
    directory, trainer = setting
    rng = np.random.default_rng(["grpo", "dr_grpo", "dapo"].index(loss))
    ids = rng.integers(0, VOCAB, (ROWS, PROMPT + COMPLETION))
    mask = np.arange(COMPLETION) < rng.integers(3, COMPLETION + 1, ROWS)[:, None]
    of_rollouts = advantages(rng.normal(size=ROWS), np.repeat([0, 1], ROWS // 2), "group")
    whole = torch.from_numpy(ids)
    attended = np.concatenate([np.ones((ROWS, PROMPT), int), mask], axis=1)
    with torch.no_grad():
        theirs = trainer.model(input_ids=whole, attention_mask=torch.from_numpy(attended)).logits.float()
        now = theirs.log_softmax(-1)[:, PROMPT - 1 : -1].gather(-1, whole[:, PROMPT:, None])[..., 0].numpy()
    old, before = (now + rng.normal(0, 0.3, now.shape).astype(np.float32) for _ in range(2))
    arrays = {
        "prompt_ids": whole[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": whole[:, PROMPT:],
        "completion_mask": torch.from_numpy(mask.astype(np.int64)),
        "advantages": torch.from_numpy(of_rollouts),
        "old_per_token_logps": torch.from_numpy(old),
        "ref_per_token_logps": torch.from_numpy(before),
        "num_items_in_batch": torch.tensor(float(mask.sum())),
    }
    trainer.loss_type, trainer.args.use_bias_correction_kl = loss, unbiased
    trainer.model.zero_grad()
    expected = trainer._compute_loss(trainer.model, arrays)
    expected.backward()

    limit = COMPLETION if loss == "dr_grpo" else None
    policy = PolicyConfig(loss=loss, kl=KL, unbiased_kl=unbiased, clip_low=LOW, clip_high=HIGH, max_completion=limit)
    ours = load_model(directory, adapt=on_one_device)
    length = PROMPT + COMPLETION - 1
    data = ours.config.data.model_copy(update={"batch_size": ROWS, "seq_len": length})
    config = ours.config.model_copy(update={"policy": policy, "data": data})

    def placed(values):
        return np.concatenate([np.zeros((ROWS, PROMPT - 1), values.dtype), values], axis=1)

    counted = placed(mask)
    rows = {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (ROWS, length)).copy(),
        "segment_ids": attended[:, :-1].astype(np.int32),
        "weights": token_shares(policy, counted),
        ADVANTAGES: np.where(counted, of_rollouts[:, None], 0).astype(np.float32),
        OLD: placed(old),
        REFERENCE: placed(before),
    }
    batch = to_global(rows, ours.partitioner)

    def objective(params):
        return policy_sums(ours.spec, config, ours.partitioner, params, batch)[:2]

    gradients, sums = jax.jit(jax.grad(objective, has_aux=True), compiler_options=QUICK_COMPILE)(ours.params)
    means = {name: float(value) for name, value in sums.means(jnp.float32(mask.sum())).items()}
    assert means["loss"] == pytest.approx(expected.item(), rel=1e-5)
    metrics = trainer._metrics["eval"]
    assert means["policy/kl"] == pytest.approx(metrics["kl"][-1], rel=1e-5)
    assert means["policy/clipped_low"] == pytest.approx(metrics["clip_ratio/low_mean"][-1], rel=1e-5)
    assert means["policy/clipped_high"] == pytest.approx(metrics["clip_ratio/high_mean"][-1], rel=1e-5)
    assert means["policy/clipped_low"] * means["policy/clipped_high"] > 0
    found = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    trainer.model.save_pretrained(tmp_path, state_dict=found)  # gradients take the way of weights into our layout
    compare_gradients(gradients, load_model(tmp_path, adapt=on_one_device).params)
