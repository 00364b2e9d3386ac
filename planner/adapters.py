"""Low-rank adapters (`lora`): their matrices, parameters and sizes on a device.

An adapter of a matrix with I inputs and O outputs has A [I, Z] and B [Z, O], Z the rank; with lora.dora also O magnitudes. A has the
sharding of the matrix's inputs, B that of its outputs; the rank is not sharded (models/lora.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.configs.tuning_schema import EXPERT
from ridgeline.planner.parameters import DOWN, attention_weights


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix with an adapter."""

    name: str
    """As in lora.targets."""
    layers: int
    """Number of layers that have it."""
    inputs: int
    outputs: int
    rank: int
    magnitudes: bool
    """Of lora.dora."""
    experts: int = 0
    """Routed experts of a layer, each with such a matrix; 0: it is no matrix of routed experts."""
    per_token: int = 1
    """How many of a layer's matrices multiply a token."""
    shared: bool = False
    """It is a matrix of the shared experts."""

    @property
    def label(self) -> str:
        """The name, unique among the matrices of a model."""
        return f"shared experts' {self.name}" if self.shared else self.name

    @property
    def writes_stream(self) -> bool:
        """Whether its result is an update of the residual stream: tensor shards its inputs, fsdp its outputs."""
        return self.name in ("out", "down", f"{EXPERT}down")

    @property
    def writes_latent(self) -> bool:
        """Whether its result is a latent, which tensor does not shard."""
        return self.name in DOWN

    @property
    def on_shards(self) -> bool:
        """Whether tensor shards the tokens of the narrow vectors."""
        return self.writes_stream or self.writes_latent

    @property
    def embed_side(self) -> int:
        """Elements of A or B in one layer, whichever fsdp shards."""
        return self.rank * (self.outputs if self.writes_stream else self.inputs)

    @property
    def other_side(self) -> int:
        """Elements of the other one, which tensor shards (not of a projection to a latent)."""
        return self.rank * (self.inputs if self.writes_stream else self.outputs)

    @property
    def parameters(self) -> int:
        """Parameters of its adapter in one layer."""
        return max(1, self.experts) * (self.embed_side + self.other_side) + (self.outputs if self.magnitudes else 0)

    def local_magnitudes(self, tensor: int) -> int:
        """Return the magnitudes of one layer on one device."""
        return (self.outputs // (1 if self.on_shards else tensor)) if self.magnitudes else 0

    def local_parameters(self, fsdp: int, tensor: int, expert: int) -> int:
        """Return the parameters of its adapter in one layer on one device. fsdp: with the devices of expert, or 1."""
        if self.experts:
            return self.experts // expert * (self.embed_side // max(1, fsdp // expert) + self.other_side // tensor)
        other = self.other_side // (1 if self.writes_latent else tensor)
        return self.embed_side // fsdp + other + self.local_magnitudes(tensor)


def adapted_matrices(config: Config) -> list[AdaptedMatrix]:
    """Return the matrices of a config that have an adapter; [] without adapters."""
    lora, model = config.lora, config.model
    targets = lora.targets_of(model)
    if lora.rank is None:
        return []
    shapes = _matrices(model)
    found = [
        AdaptedMatrix(name, layers, ins, outs, lora.rank, lora.dora, shared=shared)
        for name, layers, ins, outs, shared in shapes
        if name in targets
    ]
    if (moe := model.moe) is not None:
        sides = {"gate": (model.embed_dim, model.expert_width), "up": (model.embed_dim, model.expert_width)}
        sides["down"] = (model.expert_width, model.embed_dim)
        found += [
            AdaptedMatrix(f"{EXPERT}{name}", model.moe_layers, *shape, lora.rank, False, moe.experts, moe.experts_per_token)
            for name, shape in sides.items()
            if f"{EXPERT}{name}" in targets
        ]
    return found


def _matrices(model: ModelConfig) -> list[tuple[str, int, int, int, bool]]:
    """Return name, layers, inputs and outputs of the matrices of attention, MLP and shared experts, and whether it is one of the last."""
    shapes = [(name, model.num_layers, *shape, False) for name, shape in attention_weights(model).items()]
    width = 0 if model.moe is None else model.moe.shared_experts * model.expert_width
    for layers, hidden, shared in ((model.dense_layers, model.mlp_dim, False), (model.moe_layers if width else 0, width, True)):
        gates = ("gate", "up") if model.gated_mlp else ("up",)
        shapes += [(name, layers, model.embed_dim, hidden, shared) for name in gates if layers]
        shapes += [("down", layers, hidden, model.embed_dim, shared)] if layers else []
    return shapes


def base_scales(model: ModelConfig, tensor: int, expert: int) -> int:
    """Return the scales of the matrices of all layers on one device (lora.base=int8): one per output channel, which tensor shards."""
    of_stream = {"out", "down", *DOWN}
    scales = sum(layers * (outs if name in of_stream else outs // tensor) for name, layers, _, outs, _ in _matrices(model))
    if (moe := model.moe) is not None:
        gates = 2 if model.gated_mlp else 1
        scales += model.moe_layers * moe.experts // expert * (gates * model.expert_width // tensor + model.embed_dim)
    return scales


def adapter_parameters(config: Config) -> int:
    """Return the number of trained parameters of a config with adapters."""
    return sum(matrix.layers * matrix.parameters for matrix in adapted_matrices(config))
