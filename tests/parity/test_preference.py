"""Losses of preference pairs and their gradients against TRL's DPOTrainer on the same tiny Llama.

TRL's DPO ignores label smoothing: with it (conservative DPO) the loss is compared with the paper's formula in PyTorch.
"""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ridgeline.configs.schema import Config, MeshConfig
from ridgeline.configs.tuning_schema import PreferenceConfig
from ridgeline.models.preference import REFERENCE
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.step import make_log_prob_step, preference_sums, to_global
from tests.loaders.chats import write_chat_tokenizer
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import LLAMA, Variant, load_theirs, save_random_model

pytestmark = pytest.mark.parity
ROWS, LENGTH, BETA = 8, 24, 0.3
LOSSES = [("dpo", 0.0), ("dpo", 0.2), ("ipo", 0.0), ("hinge", 0.0), ("robust", 0.2)]
"""Loss and label smoothing. TRL calls DPO `sigmoid`."""


def make_rows(vocab: int) -> dict[str, np.ndarray]:
    """Pairs of different lengths: a prompt, an answer that counts, padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (ROWS, LENGTH + 1)).astype(np.int32)
    prompt = np.repeat(rng.integers(2, 8, ROWS // 2), 2)
    tokens[1::2, :8] = np.where(np.arange(8) < prompt[1::2, None], tokens[::2, :8], tokens[1::2, :8])
    lengths = rng.integers(10, LENGTH + 1, ROWS)
    at = np.arange(LENGTH)
    here, following = at < lengths[:, None], at + 1 < lengths[:, None]
    return {
        "tokens": np.where(here, tokens[:, :-1], 0),
        "targets": tokens[:, 1:],
        "positions": np.where(here, at, 0).astype(np.int32),
        "segment_ids": here.astype(np.int32),
        "weights": (following & (at + 1 >= prompt[:, None])).astype(np.float32),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dpo")
    write_chat_tokenizer(directory / "tokenizer", "chatml")
    vocab = 427
    save_random_model(Variant("llama", LLAMA | {"vocab_size": vocab, "num_key_value_heads": 2}), directory / "reference")
    return directory


def with_preference(config: Config, loss: str, smoothing: float) -> Config:
    preference = PreferenceConfig(loss=loss, beta=BETA, label_smoothing=smoothing)
    data = config.data.model_copy(update={"batch_size": ROWS, "seq_len": LENGTH})
    return config.model_copy(update={"preference": preference, "data": data})


@pytest.fixture(scope="module")
def trl_trainer(base):
    """TRL's trainer of a model that has moved away from its reference."""
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    moved, reference = (load_theirs(base / "reference") for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    moved.save_pretrained(base / "moved")
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    options = {"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    arguments = DPOConfig(output_dir=str(base / "out"), beta=BETA, **options)
    return DPOTrainer(moved, ref_model=reference, args=arguments, train_dataset=data, processing_class=tokenizer)


def on_one_device(config: Config) -> Config:
    return config.model_copy(update={"mesh": MeshConfig(fsdp=1)})


def their_loss(trainer, rows: dict[str, np.ndarray]):
    """TRL's own loss of the rows: first all chosen sides, then all rejected ones."""
    order = [*range(0, ROWS, 2), *range(1, ROWS, 2)]
    lengths = rows["segment_ids"].sum(axis=1)[:, None]
    mask = np.concatenate([np.zeros((ROWS, 1), np.float32), rows["weights"][:, :-1]], axis=1)
    arrays = {"input_ids": rows["tokens"], "attention_mask": np.arange(LENGTH) < lengths, "completion_mask": mask}
    return trainer.compute_loss(
        trainer.model, {name: torch.from_numpy(np.asarray(x[order]).astype(np.int64)) for name, x in arrays.items()}
    )


def conservative_loss(trainer, rows: dict[str, np.ndarray], smoothing: float):
    """Mitchell, "A note on DPO with noisy preferences", 2023, from the logits of transformers' models."""
    tokens, targets, mask = (torch.from_numpy(rows[name]) for name in ("tokens", "targets", "weights"))
    attention = torch.from_numpy(rows["segment_ids"])

    def log_probs(model) -> torch.Tensor:
        logits = model(input_ids=tokens.long(), attention_mask=attention).logits
        return (logits.log_softmax(-1).gather(-1, targets.long()[..., None])[..., 0] * mask).sum(dim=1)

    with torch.no_grad():
        reference = log_probs(trainer.ref_model)
    ratio = log_probs(trainer.model) - reference
    probability = torch.sigmoid(BETA * (ratio[::2] - ratio[1::2]))  # that the chosen answer is preferred
    return -((1 - smoothing) * probability.log() + smoothing * (1 - probability).log()).mean()


def compare_gradients(ours, theirs) -> None:
    whole = math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(theirs)))
    assert whole > 0
    for (path, found), wanted in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(theirs), strict=True):
        error = np.linalg.norm(np.asarray(found) - np.asarray(wanted))
        assert error <= 2e-5 * np.linalg.norm(wanted) + 1e-6 * whole, jax.tree_util.keystr(path)


@pytest.mark.parametrize(("loss", "smoothing"), LOSSES)
def test_loss_and_gradients_equal_those_of_trl(loss, smoothing, base, trl_trainer, tmp_path):
    trl_trainer.loss_types, trl_trainer.label_smoothing = ["sigmoid" if loss == "dpo" else loss], smoothing
    rows = make_rows(427)
    trl_trainer.model.zero_grad()
    theirs = their_loss(trl_trainer, rows)  # and the metrics, which no loss changes
    if loss == "dpo" and smoothing:
        theirs = conservative_loss(trl_trainer, rows, smoothing)
    theirs.backward()

    moved, reference = (load_model(base / name, adapt=on_one_device) for name in ("moved", "reference"))
    config = with_preference(moved.config, loss, smoothing)
    batch = to_global(rows, moved.partitioner)
    log_probs = jax.jit(make_log_prob_step(moved.spec, config, moved.partitioner), compiler_options=QUICK_COMPILE)
    batch[REFERENCE] = log_probs(reference.params, batch)[:, None]

    def objective(params):
        surrogate, sums, _ = preference_sums(moved.spec, config, moved.partitioner, params, batch)
        return surrogate / (ROWS // 2), sums.means(jnp.float32(ROWS // 2))

    gradients, means = jax.jit(jax.grad(objective, has_aux=True), compiler_options=QUICK_COMPILE)(moved.params)
    assert float(means["loss"]) == pytest.approx(theirs.item(), rel=1e-5)
    metrics = trl_trainer._metrics["eval"]  # dropout is off
    for ours, name in (("accuracy", "accuracies"), ("margin", "margins"), ("chosen_reward", "chosen"), ("rejected_reward", "rejected")):
        assert float(means[f"preference/{ours}"]) == pytest.approx(metrics[f"rewards/{name}"][-1], rel=1e-5, abs=2e-5), ours
    for side in ("chosen", "rejected"):
        assert float(means[f"preference/{side}_log_prob"]) == pytest.approx(metrics[f"logps/{side}"][-1], rel=1e-5)

    found = {name: parameter.grad for name, parameter in trl_trainer.model.named_parameters()}
    trl_trainer.model.save_pretrained(tmp_path, state_dict=found)  # gradients take the way of weights into our layout
    compare_gradients(gradients, load_model(tmp_path, adapt=on_one_device).params)
