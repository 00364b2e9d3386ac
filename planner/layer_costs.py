"""What a layer costs under each rematerialisation policy, as measured on a device: the entries `layers` of a calibration file.

`ridge bench remat CONFIG --into FILE` writes them. Where the calibration has an entry for the device and the shape of the layer, the
planner takes the seconds a policy adds to `none` from it instead of counting FLOPs and bytes; what every policy pays stays with the
formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import model_validator

from ridgeline.configs.schema import Config, Name, PositiveFloat, PositiveInt, RematConfig, Section
from ridgeline.planner.local import LocalSizes, attention_backend


class LayerShape(Section):
    """What decides the work of a layer on one device, but for the number of its tokens."""

    embed_dim: PositiveInt
    """Width of the stream."""
    num_heads: PositiveInt
    """Query heads of one device: of the model, over mesh.tensor."""
    num_kv_heads: PositiveInt
    """Key and value heads of one device."""
    head_dim: PositiveInt
    """Width of a head."""
    mlp_dim: PositiveInt
    """Hidden width of the MLP on one device."""
    seq_len: PositiveInt
    """Tokens of a row."""
    compute: Name
    """precision.compute."""
    matmul: Name = "compute"
    """precision.matmul."""
    attention: Name
    """Attention backend that runs, never auto; with the block size where the backend has one."""
    gated_mlp: bool = True
    qk_norm: bool = False
    document_masking: bool = True
    sliding_window: PositiveInt | None = None
    norm: Name = "rmsnorm"
    activation: Name = "silu"
    scan_layers: bool = True
    matmul_precision: Name = "default"

    @classmethod
    def of(cls, local: LocalSizes, *, gpu: bool) -> LayerShape:
        """Return the shape of a config's layers on one device. Norms and residual adds count whole, also where tensor cuts them."""
        config, model = local.config, local.model
        backend = attention_backend(config, gpu=gpu)
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
            document_masking=config.data.document_masking,
            sliding_window=model.sliding_window,
            norm=model.norm,
            activation=model.activation,
            scan_layers=config.compute.scan_layers,
            matmul_precision=config.compute.matmul_precision,
        )


class PolicyCost(Section):
    """A layer under one policy."""

    policy: Name
    """As compute.remat.policy."""
    names: list[Name] = []
    """As compute.remat.names."""
    layer_s: PositiveFloat
    """Seconds of a layer, forward and backward; for `none` with its share of what is outside the layers of the measured model."""
    kept_bytes: int
    """What a layer adds to the temporary memory of the compiled program."""

    def is_of(self, remat: RematConfig) -> bool:
        """Whether this is the cost of a policy. Offloaded block inputs compute what `full` does; the planner counts their copies."""
        if remat.policy == "offload":
            return self.policy == "full" and set(remat.names) == {"block_input"}
        return self.policy == remat.policy and set(self.names) == set(remat.names)

    @property
    def remat(self) -> RematConfig:
        """The policy as a config has it."""
        return RematConfig.model_validate({"policy": self.policy, "names": list(self.names)})


class LayerPoint(Section):
    """One measurement: a shape of layer on a device, under every policy."""

    device: Name
    """Catalogue name."""
    shape: LayerShape
    tokens: PositiveInt
    """Of the microbatch it was measured with; time is taken to grow with the number of tokens."""
    policies: list[PolicyCost]
    source: str
    """How it was measured."""

    @model_validator(mode="after")
    def _each_once_and_none_among_them(self) -> LayerPoint:
        keys = [(cost.policy, frozenset(cost.names)) for cost in self.policies]
        if len(set(keys)) != len(keys):
            raise ValueError("policies: no policy twice")
        if not any(cost.policy == "none" for cost in self.policies):
            raise ValueError("policies: `none` is needed, the others are compared with it")
        return self

    @property
    def none_s(self) -> float:
        """Seconds of a layer that keeps everything."""
        return next(cost.layer_s for cost in self.policies if cost.policy == "none")

    def again_s(self, remat: RematConfig, tokens: int) -> float | None:
        """Return what a policy adds to a layer of this many tokens (negative: it saves time); None for a policy not measured."""
        found = next((cost for cost in self.policies if cost.is_of(remat)), None)
        return None if found is None else (found.layer_s - self.none_s) * tokens / self.tokens

    def sentence(self) -> str:
        """The measurement in words."""
        more = [
            f"{cost.policy}{'(' + ', '.join(cost.names) + ')' if cost.names else ''} {(cost.layer_s - self.none_s) * 1e3:+.3g} ms"
            for cost in self.policies
            if cost.policy != "none"
        ]
        return (
            f"recompute measured, per layer and {self.tokens:,} tokens: none {self.none_s * 1e3:.3g} ms, {', '.join(more)} ({self.source})"
        )


def find_point(points: Sequence[LayerPoint], device: str, shape: LayerShape) -> LayerPoint | None:
    """Return the latest measurement of this shape on this device."""
    return next((point for point in reversed(points) if point.device == device and point.shape == shape), None)


def without_recompute(config: Config) -> Config:
    """Return the config with everything kept."""
    return config.model_copy(update={"compute": config.compute.model_copy(update={"remat": RematConfig(policy="none")})})
