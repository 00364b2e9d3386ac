"""What makes the PyTorch peer of `benchmarks/gpu.py` as fast as PyTorch allows: a chunked loss, float8 linear layers, fused attention.

Legend: N tokens, C tokens of a chunk, D embed width, V vocabulary, K inputs and M outputs of a linear layer.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CHUNK_TOKENS = 2048
"""Tokens with logits at a time: 128,256 logits each take 2.6 GB with their float32 copies and gradient."""
ATTENTION = "causal_sdpa"
"""Name under which transformers finds `causal_attention`."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _chunk(x_CD: Tensor, w_VD: Tensor, targets_C: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk in nats, float32, and the gradient of its logits times `scale`, in x's dtype."""
    logits_CV = (x_CD @ w_VD.t()).float()
    lse_C = torch.logsumexp(logits_CV, dim=-1)
    target_C1 = logits_CV.gather(1, targets_C[:, None])
    ids_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    gradient_CV = (torch.exp(logits_CV - lse_C[:, None]) - (ids_V == targets_C[:, None]).float()) * scale
    return (lse_C - target_C1[:, 0]).sum(), gradient_CV.to(x_CD.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of next tokens, without the logits of all tokens: the forward pass also computes both gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w_VD: Tensor, targets_N: Tensor, chunk: Any, size: int) -> Tensor:
        """Return the mean, float32 scalar. x in the dtype of the arithmetic; w in its own. `chunk`: `_chunk`, compiled or not."""
        used_VD = w_VD.to(x_ND.dtype)
        loss = x_ND.new_zeros((), dtype=torch.float32)
        x_gradient_ND = torch.empty_like(x_ND)
        w_gradient_VD = torch.zeros_like(w_VD, dtype=torch.float32)
        for begin in range(0, x_ND.shape[0], size):
            x_CD = x_ND[begin : begin + size]
            part, gradient_CV = chunk(x_CD, used_VD, targets_N[begin : begin + size], 1.0 / x_ND.shape[0])
            loss += part
            torch.mm(gradient_CV, used_VD, out=x_gradient_ND[begin : begin + size])
            w_gradient_VD += gradient_CV.t() @ x_CD
        ctx.save_for_backward(x_gradient_ND, w_gradient_VD.to(w_VD.dtype))
        return loss / x_ND.shape[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Scale the gradients of the forward pass."""
        x_gradient_ND, w_gradient_VD = ctx.saved_tensors
        (factor,) = upstream
        return x_gradient_ND * factor.to(x_gradient_ND.dtype), w_gradient_VD * factor.to(w_gradient_VD.dtype), None, None, None


class ChunkedLoss:
    """The loss of hidden states. compile: let torch.compile fuse what surrounds the matmul of a chunk."""

    def __init__(self, *, compile: bool, tokens: int = CHUNK_TOKENS) -> None:
        self._chunk = torch.compile(_chunk, dynamic=False) if compile else _chunk
        self._tokens = tokens

    def __call__(self, x_BTD: Tensor, w_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy of targets [B, T] under softmax(x w), float32 scalar."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            loss: Tensor = ChunkedCrossEntropy.apply(x_BTD.flatten(0, 1), w_VD, targets_BT.flatten(), self._chunk, self._tokens)
            return loss


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in a float8 dtype and its scale (x is about values * scale): float32, the smallest power of two that avoids overflow."""
    amax = x.abs().amax().float()
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp(min=2.0**-100) / torch.finfo(dtype).max)))
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return (x.float() / scale).to(dtype), scale


def float8_matmul(left_MK: Tensor, left_scale: Tensor, right_NK: Tensor, right_scale: Tensor, fast: bool) -> Tensor:
    """Return left right^T [M, N] in bf16. Both operands lie row by row in memory, as Hopper's float8 kernels need them.

    fast: cuBLASLt's accumulation with fewer bits, which PyTorch's users choose for the forward pass. CPUs multiply the same values in
    float32.
    """
    if left_MK.is_cuda:
        return torch._scaled_mm(  # type: ignore[no-any-return]  # the float8 matmul has no public name
            left_MK, right_NK.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return ((left_MK.float() @ right_NK.float().t()) * (left_scale * right_scale)).to(torch.bfloat16)


class Float8Matmul(torch.autograd.Function):
    """x w^T in float8, with a scale per tensor of this step: inputs and weights e4m3, gradients e5m2."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, w_MK: Tensor) -> Tensor:
        """Return [N, M] in bf16. x in bf16; w in its own dtype."""
        x8, x_scale = quantize(x_NK, E4M3)
        w8, w_scale = quantize(w_MK, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.weight_dtype = w_MK.dtype
        return float8_matmul(x8, x_scale, w8, w_scale, True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x in bf16 and of w in its dtype."""
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantize(upstream[0], E5M2)
        x_gradient = float8_matmul(g8, g_scale, w8.t().contiguous(), w_scale, False)
        w_gradient = float8_matmul(g8.t().contiguous(), g_scale, x8.t().contiguous(), x_scale, False)
        return x_gradient, w_gradient.to(ctx.weight_dtype)


class Float8Linear(nn.Module):
    """A linear layer without bias whose three matmuls are in float8. Its dims must be multiples of 16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.bias is not None or linear.in_features % 16 or linear.out_features % 16:
            raise ValueError(f"no float8 layer for {linear}")
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T in bf16."""
        y: Tensor = Float8Matmul.apply(x.to(torch.bfloat16).flatten(0, -2), self.weight)
        return y.unflatten(0, x.shape[:-1])


def use_float8(module: nn.Module) -> int:
    """Replace all linear layers in a module by float8 ones; return their number."""
    count = 0
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Float8Linear(child))
            count += 1
        else:
            count += use_float8(child)
    return count


def causal_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> tuple[Tensor, None]:
    """Return [B, T, heads, width] and no weights. query, key, value [B, heads, T, width]; keys may have fewer heads.

    transformers' own function may build a mask of T x T elements while it is compiled, with which no fused kernel runs.
    """
    assert mask is None, "rows are neither padded nor packed"
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=more["scaling"], enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None


def fused_attention() -> Any:
    """Return a context in which attention runs in cuDNN's kernel, else in FlashAttention, and never without a fused kernel on a GPU."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
