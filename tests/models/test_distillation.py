"""The divergence from a teacher's top-k tokens against PyTorch's kl_div, with its gradients; sharded vocabularies; the choice of tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ridgeline.configs.schema import MeshConfig
from ridgeline.models.distillation import Teacher, top_tokens
from ridgeline.models.loss import LossSums, cross_entropy
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from tests.models.tiny import QUICK_COMPILE

B, T, D, V, PADDED = 4, 12, 16, 50, 56


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((B, T, D)).astype(np.float32),
        "w": np.pad(rng.standard_normal((D, V)).astype(np.float32), ((0, 0), (0, PADDED - V)), constant_values=3.0),
        "targets": rng.integers(0, V, (B, T)).astype(np.int32),
        "weights": (rng.integers(0, 2, (B, T)) * rng.uniform(0.5, 2, (B, T))).astype(np.float32),
        "teacher": (2 * rng.standard_normal((B, T, V))).astype(np.float32),
    }


def stored(logits: np.ndarray, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The teacher's ids, their log-probabilities, and that of all others."""
    log_p = (torch.from_numpy(logits) / temperature).log_softmax(-1)
    top = log_p.topk(top_k, -1)
    return top.indices, top.values, others(log_p, top.indices)


def others(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rest = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
    return torch.where(rest, log_p, -torch.inf).logsumexp(-1, keepdim=True)


def ours(made: dict[str, np.ndarray], teacher: Teacher, partitioner: Partitioner, chunk: int, **settings: Any) -> Any:
    def objective(x: jax.Array, w: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = cross_entropy(
            x,
            w,
            jnp.asarray(made["targets"]),
            jnp.asarray(made["weights"]),
            vocab_size=V,
            chunk=chunk,
            z_loss=1e-2,
            partitioner=partitioner,
            teacher=teacher,
            **settings,
        )
        return sums.objective / sums.weight, sums

    run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True), compiler_options=QUICK_COMPILE)
    return run(jnp.asarray(made["x"]), jnp.asarray(made["w"]))


def theirs(made: dict[str, np.ndarray], ids: torch.Tensor, top: torch.Tensor, rest: torch.Tensor | None, **settings: Any) -> Any:
    """Loss, divergence and gradients by PyTorch."""
    temperature, weight, cap = settings["temperature"], settings["teacher_weight"], settings["softcap"]
    x, w = (torch.tensor(made[name], requires_grad=True) for name in "xw")
    logits = x @ w[:, :V]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_q = (logits / temperature).log_softmax(-1)
    student = log_q.gather(-1, ids)
    if rest is None:
        student, teacher = student.log_softmax(-1), top.log_softmax(-1)
    elif top.shape[-1] == V:
        teacher = top  # there are no others: the divergence of both distributions
    else:
        student, teacher = torch.cat([student, others(log_q, ids)], -1), torch.cat([top, rest], -1)
    kl = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(made["targets"]).long().flatten(), reduction="none")
    per_token = (1 - weight) * nats.view(B, T) + weight * temperature**2 * kl + 1e-2 * logits.logsumexp(-1) ** 2
    of = torch.from_numpy(made["weights"])
    loss = (of * per_token).sum() / of.sum()
    loss.backward()
    return loss.item(), (of * kl).sum().item(), (x.grad.numpy(), w.grad.numpy())


def drawn_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(100 + seed)
    return {
        "top_k": [V, V - 1, 1][seed] if seed < 3 else int(rng.integers(2, 20)),
        "temperature": 1.0 if seed == 3 else float(rng.uniform(0.5, 4)),
        "teacher_weight": 1.0 if seed == 4 else float(rng.uniform(0.1, 0.9)),
        "softcap": float(rng.uniform(1, 5)) if seed % 3 == 0 else None,
        "rest": bool(seed < 4 or rng.integers(2)),
        "chunk": int(rng.choice([4, 20, 48])),
    }


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradients_equal_those_of_pytorch(seed: int) -> None:
    case, made = drawn_case(seed), arrays(seed)
    ids, top, rest = stored(made["teacher"], case.pop("top_k"), case["temperature"])
    with_rest, chunk = case.pop("rest"), case.pop("chunk")
    log_probs = torch.cat([top, rest], -1) if with_rest else top
    teacher = Teacher(jnp.asarray(ids.numpy(), jnp.int32), jnp.asarray(log_probs.numpy()))
    (value, sums), gradients = ours(made, teacher, Partitioner.single(), chunk, **case)
    loss, divergence, expected = theirs(made, ids, top, rest if with_rest else None, **case)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(sums.divergence, divergence, rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-7)


def test_a_student_that_is_the_teacher_has_no_divergence_and_a_confident_one_has_finite_gradients() -> None:
    made = arrays(0)
    own = np.einsum("btd,dv->btv", made["x"], made["w"][:, :V])
    ids, top, rest = stored(own, 5, 1.0)
    teacher = Teacher(jnp.asarray(ids.numpy(), jnp.int32), jnp.asarray(torch.cat([top, rest], -1).numpy()))
    settings = {"teacher_weight": 1.0, "temperature": 1.0, "softcap": None}
    (_, sums), _ = ours(made, teacher, Partitioner.single(), 20, **settings)
    assert abs(float(sums.divergence)) < 1e-4
    made["w"] *= 100  # probabilities of most tokens underflow
    (value, sums), gradients = ours(made, teacher, Partitioner.single(), 20, **settings)
    assert float(sums.divergence) > 10
    assert all(np.isfinite(x).all() for x in (value, *gradients))


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}, {"context": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("rest", [True, False], ids=["bucket", "renormalize"])
def test_a_sharded_vocabulary_gives_what_one_device_gives(mesh: dict[str, int], rest: bool) -> None:
    config = MeshConfig(**{"fsdp": 1, **mesh})
    partitioner = Partitioner(build_mesh(config, jax.devices()[: int(np.prod(list(config.sizes.values())))]))
    made = arrays(9)
    scaled = jnp.asarray(made["teacher"])
    padded = jnp.pad(scaled, ((0, 0), (0, 0), (0, PADDED - V)), constant_values=jnp.finfo(jnp.float32).min)
    shards = partitioner.axis_size("batch") * partitioner.axis_size("seq")
    choose = partial(top_tokens, temperature=1.5, count=9)
    found, alone = (
        jax.jit(lambda logits, part=part: choose(part, logits_RBCV=logits), compiler_options=QUICK_COMPILE)(
            padded.reshape(n, -1, T, PADDED)
        )
        for part, n in ((partitioner, shards), (Partitioner.single(), 1))
    )
    teacher = Teacher(*(jnp.asarray(np.asarray(x).reshape(B, T, -1)) for x in alone))
    np.testing.assert_array_equal(np.asarray(found.ids).reshape(B, T, -1), teacher.ids)
    np.testing.assert_allclose(np.asarray(found.log_probs).reshape(B, T, -1), teacher.log_probs, rtol=1e-5)
    ids, top, of_others = stored(made["teacher"], 9, 1.5)
    np.testing.assert_array_equal(teacher.ids, ids)
    np.testing.assert_allclose(teacher.log_probs, torch.cat([top, of_others], -1), rtol=1e-5)
    teacher = teacher if rest else Teacher(teacher.ids, teacher.log_probs[..., :-1])
    settings = {"teacher_weight": 0.7, "temperature": 1.5, "softcap": None, "chunk": 6}
    got, want = (ours(made, teacher, part, **settings) for part in (partitioner, Partitioner.single()))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), got, want)


def test_the_whole_vocabulary_leaves_no_probability_to_others() -> None:
    logits = jnp.asarray(arrays(1)["teacher"])[None]
    found = jax.jit(lambda logits: top_tokens(Partitioner.single(), 2.0, logits, V), compiler_options=QUICK_COMPILE)(logits)
    assert float(jnp.exp(found.log_probs[..., -1]).max()) == 0
    np.testing.assert_allclose(jnp.sum(jnp.exp(found.log_probs), -1), 1, rtol=1e-5)


def test_memory_is_bounded_by_the_chunk() -> None:
    """The logits of 2,048 tokens and 8,192 ids are 64 MiB; a chunk has 128 tokens."""
    shapes = {"x": (4, 512, 32), "w": (32, 8192), "targets": (4, 512), "ids": (4, 512, 16), "values": (4, 512, 17)}
    kinds = {"targets": jnp.int32, "ids": jnp.int32}
    made = {name: jax.ShapeDtypeStruct(shape, kinds.get(name, jnp.float32)) for name, shape in shapes.items()}

    def objective(x: jax.Array, w: jax.Array, targets: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        settings = {"chunk": 128, "z_loss": 0.0, "teacher_weight": 0.5, "temperature": 2.0, "partitioner": Partitioner.single()}
        return cross_entropy(x, w, targets, jnp.ones((4, 512)), vocab_size=8192, teacher=Teacher(ids, values), **settings).objective

    compiled = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(*made.values()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 8192 * 4 / 3
    assert "4,512,8192" not in compiled.as_text()
