"""Measured cost of a layer under each rematerialization policy: the entries `layers` of a calibration file.

`ridge bench remat CONFIG --into FILE` writes them. Where the calibration has an entry for the device and the shape of the layer, the
planner uses the measured seconds that a policy adds to `none`, instead of counting FLOPs and bytes. The cost of `none` itself is always
counted by formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import model_validator

from ridgeline.configs.model_schema import LatentAttention
from ridgeline.configs.schema import Config, RematConfig
from ridgeline.configs.section import Name, PositiveFloat, PositiveInt, Section
from ridgeline.planner.local import LocalSizes


class LayerShape(Section):
    """Everything that determines the work of a layer on one device, except the number of tokens."""

    embed_dim: PositiveInt
    """Width of the residual stream."""
    num_heads: PositiveInt
    """Query heads on one device: model.num_heads / mesh.tensor."""
    num_kv_heads: PositiveInt
    """Key/value heads on one device."""
    head_dim: PositiveInt
    """Width of a head."""
    mlp_dim: PositiveInt
    """Hidden width of the MLP on one device."""
    seq_len: PositiveInt
    """Tokens of a row."""
    compute: Name
    """precision.compute of the config."""
    matmul: Name = "compute"
    """precision.matmul of the config."""
    attention: Name
    """Attention backend, with `auto` resolved, and the block size if it has one (chunked-128)."""
    gated_mlp: bool = True
    """model.gated_mlp of the config."""
    qk_norm: bool = False
    """model.qk_norm of the config."""
    latent_attention: LatentAttention | None = None
    """model.latent_attention of the config."""
    document_masking: bool = True
    """data.document_masking of the config."""
    sliding_window: PositiveInt | None = None
    """model.sliding_window of the config."""
    attention_chunk: PositiveInt | None = None
    """model.attention_chunk of the config."""
    full_attention_every: PositiveInt | None = None
    """model.full_attention_every of the config."""
    softcap: bool = False
    """Whether attention scores are soft-capped."""
    norm: Name = "rmsnorm"
    """model.norm of the config."""
    norm_position: Name = "pre"
    """model.norm_position of the config."""
    activation: Name = "silu"
    """model.activation of the config."""
    scan_layers: bool = True
    """compute.scan_layers of the config."""
    matmul_precision: Name = "default"
    """compute.matmul_precision of the config."""

    @classmethod
    def of(cls, local: LocalSizes, *, gpu: bool) -> LayerShape:
        """Return the shape of a config's layers on one device. Norms and residual adds count as not sharded over tensor."""
        config, model = local.config, local.model
        backend = local.attention_backend(gpu=gpu)
        return cls(
            embed_dim=model.embed_dim,
            num_heads=model.num_heads // local.tensor,
            num_kv_heads=max(1, model.kv_heads // local.tensor),
            head_dim=model.head_width,
            mlp_dim=model.mlp_dim // local.tensor,
            seq_len=config.data.seq_len,
            compute=config.precision.compute,
            matmul=config.precision.matmul,
            attention=f"chunked-{config.compute.attention.chunk}" if backend == "chunked" else backend,
            gated_mlp=model.gated_mlp,
            qk_norm=model.qk_norm,
            latent_attention=model.latent_attention,
            document_masking=config.data.document_masking,
            sliding_window=model.sliding_window,
            attention_chunk=model.attention_chunk,
            full_attention_every=model.full_attention_every,
            softcap=model.attention_softcap is not None,
            norm=model.norm,
            norm_position=model.norm_position,
            activation=model.activation,
            scan_layers=config.compute.scan_layers,
            matmul_precision=config.compute.matmul_precision,
        )


class PolicyCost(Section):
    """Cost of a layer under one policy."""

    policy: Name
    """compute.remat.policy."""
    names: list[Name] = []
    """compute.remat.names."""
    layer_s: PositiveFloat
    """Seconds of a layer, forward and backward; that of `none` includes a share of the time outside the layers."""
    kept_bytes: int
    """Bytes that a layer adds to the temporary memory of the compiled program."""

    def is_of(self, remat: RematConfig) -> bool:
        """Whether this is the cost of a policy. Offloaded block inputs have the cost of `full`; the planner adds that of the copies."""
        if remat.offloads:
            return self.policy == "full" and set(remat.names) == {"block_input"}
        return self.policy == remat.policy and set(self.names) == set(remat.names)

    @property
    def remat(self) -> RematConfig:
        """The policy as a section of a config."""
        return RematConfig.model_validate({"policy": self.policy, "names": list(self.names)})


class LayerPoint(Section):
    """One measurement: a layer of one shape on a device, under each policy."""

    device: Name
    """Name in the hardware catalog."""
    shape: LayerShape
    """Shape of the layer on one device."""
    tokens: PositiveInt
    """Tokens of the measured microbatch; time is assumed proportional to the number of tokens."""
    policies: list[PolicyCost]
    """Cost under each policy, `none` included."""
    source: str
    """How it was measured."""

    @model_validator(mode="after")
    def _each_once_and_none_among_them(self) -> LayerPoint:
        keys = [(cost.policy, frozenset(cost.names)) for cost in self.policies]
        if len(set(keys)) != len(keys):
            raise ValueError("policies: a policy is listed twice")
        if not any(cost.policy == "none" for cost in self.policies):
            raise ValueError("policies: `none` is missing; the others are relative to it")
        return self

    @property
    def none_s(self) -> float:
        """Seconds of a layer under `none`."""
        return next(cost.layer_s for cost in self.policies if cost.policy == "none")

    def again_s(self, remat: RematConfig, tokens: int) -> float | None:
        """Return the seconds that a policy adds to a layer of this many tokens (may be negative); None when it was not measured."""
        found = next((cost for cost in self.policies if cost.is_of(remat)), None)
        return None if found is None else (found.layer_s - self.none_s) * tokens / self.tokens

    def sentence(self) -> str:
        """Return the measurement as one sentence."""
        more = [
            f"{cost.policy}{'(' + ', '.join(cost.names) + ')' if cost.names else ''} {(cost.layer_s - self.none_s) * 1e3:+.3g} ms"
            for cost in self.policies
            if cost.policy != "none"
        ]
        return (
            f"recomputation as measured, per layer and {self.tokens:,} tokens:"
            f" none {self.none_s * 1e3:.3g} ms, {', '.join(more)} ({self.source})"
        )


def find_point(points: Sequence[LayerPoint], device: str, shape: LayerShape) -> LayerPoint | None:
    """Return the latest measurement of this shape on this device."""
    return next((point for point in reversed(points) if point.device == device and point.shape == shape), None)


def without_recompute(config: Config) -> Config:
    """Return the config with the policy `none`."""
    return config.model_copy(update={"compute": config.compute.model_copy(update={"remat": RematConfig(policy="none")})})
