"""Training FLOPs per token, per component: the numerator of MFU.

Convention. Only matmuls count, a multiply-add as 2 FLOPs; backward costs twice forward, so training is 6 FLOPs per weight and token
(Kaplan et al., arXiv 2001.08361, section 2.1; PaLM, arXiv 2204.02311, appendix B). Attention scores and their product with the values
are 6*S*N*(H + U) per layer and token in training (U = H but for latent attention), S the number of keys a query sees on average: T for full
attention, T/2 for causal (the unmasked half), W - W*W/(2T) for a sliding window of W < T, C/2 for chunks of C tokens that divide T (PaLM
counts T; here only unmasked pairs count), the mean over the layers where only some have the window or chunks. The unembedding counts, with
the vocabulary size without padding; the embedding lookup does not. Norms, softmax, activations, biases and the optimizer do not count, nor
does recomputation. Document boundaries inside a packed row are ignored: a row counts as one sequence.

Notation: D width, F MLP width, L layers, N query heads, K key/value heads, H head dim, U that of values, T sequence length, V vocabulary,
W window, C chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.adapters import adapted_matrices
from ridgeline.planner.parameters import all_mlp_matmul_parameters, attention_matmul_parameters, count_parameters, mtp_projection_parameters

CONVENTION = (
    "training FLOPs: matmuls only, backward is twice forward, a multiply-add is 2 FLOPs; attention counts unmasked pairs only"
    " (causal: half of all pairs; a window: fewer); the unembedding counts, embedding lookup and recomputation do not"
)
"""The convention in one sentence, printed with every count."""
FROZEN_FLOPS_PER_WEIGHT = 4
"""Forward 2, gradient of the input 2."""
TRAIN_FLOPS_PER_WEIGHT = 6
"""Forward 2, gradient of the input 2, gradient of the weight 2."""


@dataclass(frozen=True)
class FlopCount:
    """Training FLOPs per token of each component, over all layers."""

    qkv_projections: float
    """6*L*D*(N + 2*K)*H."""
    output_projection: float
    """6*L*N*H*D."""
    attention_scores: float
    """6*L*S*N*(H + U) with S the keys a query sees on average: H for query times key, U for weights times value."""
    mlp: float
    """18*L*D*F gated, 12*L*D*F otherwise; of experts, those that process a token, and 6*L*D*E of the router."""
    unembedding: float
    """6*D*V."""
    attention_scores_full: float
    """6*L*T*N*(H + U): attention scores if masked pairs counted too. Not part of the total."""
    query_key_share: float = 0.5
    """H / (H + U): share of query times key in the attention scores."""
    adapters: float = 0.0
    """6*Z*(I + O) per matrix with an adapter, of I inputs and O outputs."""
    mtp: float = 0.0
    """Modules of multi-token prediction: 12*D*D of the projection, 6*D*V of the unembedding, and a layer each."""
    mtp_full: float = 0.0
    """The same if masked pairs of attention counted too. Not part of the total."""
    frozen: bool = False
    """Only adapters are trained: the matmuls with other parameters count 4 per weight, without the gradient of the weight."""

    @property
    def attention_projections(self) -> float:
        """6*L*(2*D*N*H + 2*D*K*H): both projections."""
        return self.qkv_projections + self.output_projection

    @property
    def total(self) -> float:
        """FLOPs per token of one training step (forward and backward)."""
        return self.attention_projections + self.attention_scores + self.mlp + self.unembedding + self.adapters + self.mtp

    @property
    def forward(self) -> float:
        """FLOPs per token of the forward pass alone."""
        if not self.frozen:
            return self.total / 3
        trained = self.attention_scores + self.adapters
        return trained / 3 + (self.total - trained) / 2

    @property
    def total_full_attention(self) -> float:
        """Total in the convention that counts all keys, masked ones too (PaLM, nanoGPT)."""
        return self.total - self.attention_scores + self.attention_scores_full - self.mtp + self.mtp_full

    def components(self) -> dict[str, float]:
        """Return component name -> FLOPs per token; they sum to `total`."""
        adapters = {"adapters": self.adapters} if self.adapters else {}
        modules = {"mtp": self.mtp} if self.mtp else {}
        return (
            adapters
            | modules
            | {
                "qkv_projections": self.qkv_projections,
                "query_key_products": self.attention_scores * self.query_key_share,
                "attention_value_products": self.attention_scores * (1 - self.query_key_share),
                "output_projection": self.output_projection,
                "mlp": self.mlp,
                "unembedding": self.unembedding,
            }
        )


def mean_keys_per_query(seq_len: int, window: int | None, chunk: int | None = None) -> float:
    """Return the average number of keys of a causal query: T/2, or W - W*W/(2T) with a window of W < T (the diagonal counts half).

    With chunks of C < T each chunk is a causal row of its own: C queries see C/2 keys on average, and the last r = T mod C see r/2, so the
    mean is (floor(T/C) * C*C/2 + r*r/2) / T, which is C/2 where C divides T.
    """
    if chunk is not None and chunk < seq_len:
        rest = seq_len % chunk
        return (seq_len // chunk * chunk * chunk + rest * rest) / (2 * seq_len)
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)


def mean_keys_per_layer(model: ModelConfig, seq_len: int) -> float:
    """Return the average number of keys of a query over the layers, of which some may have the window or chunks and others not."""
    full = model.full_layers * mean_keys_per_query(seq_len, None)
    local = mean_keys_per_query(seq_len, model.sliding_window, model.attention_chunk)
    return (full + (model.num_layers - model.full_layers) * local) / model.num_layers


def config_flops_per_token(config: Config) -> FlopCount:
    """Count the training FLOPs per token of a config. With adapters the gradients of frozen weights do not count."""
    count = train_flops_per_token(config.model, config.data.seq_len)
    if not (matrices := adapted_matrices(config)):
        return count
    weights = sum(matrix.layers * matrix.per_token * matrix.rank * (matrix.inputs + matrix.outputs) for matrix in matrices)
    share = FROZEN_FLOPS_PER_WEIGHT / TRAIN_FLOPS_PER_WEIGHT
    return replace(
        count,
        qkv_projections=share * count.qkv_projections,
        output_projection=share * count.output_projection,
        mlp=share * count.mlp,
        unembedding=share * count.unembedding,
        adapters=TRAIN_FLOPS_PER_WEIGHT * weights,
        frozen=True,
    )


def train_flops_per_token(model: ModelConfig, seq_len: int) -> FlopCount:
    """Count the training FLOPs per token of a causal model at a sequence length (convention: module docstring)."""
    layers = model.num_layers
    output = model.num_heads * model.value_width * model.embed_dim
    both = model.head_width + model.value_width
    per_key = 6 * layers * model.num_heads * both
    unembedding = TRAIN_FLOPS_PER_WEIGHT * model.embed_dim * model.vocab_size
    mtp = mtp_full = 0.0
    if model.mtp_layers:
        blocks = train_flops_per_token(model.mtp_blocks, seq_len)
        more = TRAIN_FLOPS_PER_WEIGHT * mtp_projection_parameters(model) + (model.mtp_layers - 1) * unembedding
        mtp, mtp_full = blocks.total + more, blocks.total_full_attention + more
    return FlopCount(
        qkv_projections=TRAIN_FLOPS_PER_WEIGHT * layers * (attention_matmul_parameters(model) - output),
        output_projection=TRAIN_FLOPS_PER_WEIGHT * layers * output,
        attention_scores=per_key * mean_keys_per_layer(model, seq_len),
        mlp=TRAIN_FLOPS_PER_WEIGHT * all_mlp_matmul_parameters(model, active=True),
        unembedding=unembedding,
        mtp=mtp,
        mtp_full=mtp_full,
        attention_scores_full=per_key * seq_len,
        query_key_share=model.head_width / both,
    )


def flops_per_token_6n(model: ModelConfig) -> int:
    """Return 6 times the parameters that process a token, the embedding table included and attention excluded: the usual convention."""
    return TRAIN_FLOPS_PER_WEIGHT * count_parameters(model).active
