"""Low-rank adapters (`lora`): their matrices, parameters and sizes on a device.

An adapter of a matrix with I inputs and O outputs has A [I, Z] and B [Z, O], Z the rank; with lora.dora also O magnitudes. A has the
sharding of the matrix's inputs, B that of its outputs; the rank is not sharded (models/lora.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.schema import Config
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

    @property
    def writes_stream(self) -> bool:
        """Whether its result is an update of the residual stream: tensor shards its inputs, fsdp its outputs."""
        return self.name in ("out", "down")

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
        return self.embed_side + self.other_side + (self.outputs if self.magnitudes else 0)

    def local_magnitudes(self, tensor: int) -> int:
        """Return the magnitudes of one layer on one device."""
        return (self.outputs // (1 if self.on_shards else tensor)) if self.magnitudes else 0

    def local_parameters(self, fsdp: int, tensor: int) -> int:
        """Return the parameters of its adapter in one layer on one device."""
        other = self.other_side // (1 if self.writes_latent else tensor)
        return self.embed_side // fsdp + other + self.local_magnitudes(tensor)


def adapted_matrices(config: Config) -> list[AdaptedMatrix]:
    """Return the matrices of a config that have an adapter; [] without adapters."""
    lora, model = config.lora, config.model
    targets = lora.targets_of(model)
    if lora.rank is None:
        return []
    shapes = [(name, model.num_layers, *shape) for name, shape in attention_weights(model).items()]
    shared = 0 if model.moe is None else model.moe.shared_experts * model.expert_width
    for layers, hidden in ((model.dense_layers, model.mlp_dim), (model.moe_layers if shared else 0, shared)):
        gates = ("gate", "up") if model.gated_mlp else ("up",)
        shapes += [(name, layers, model.embed_dim, hidden) for name in gates if layers]
        shapes += [("down", layers, hidden, model.embed_dim)] if layers else []
    return [AdaptedMatrix(name, layers, ins, outs, lora.rank, lora.dora) for name, layers, ins, outs in shapes if name in targets]


def adapter_parameters(config: Config) -> int:
    """Return the number of trained parameters of a config with adapters."""
    return sum(matrix.layers * matrix.parameters for matrix in adapted_matrices(config))
