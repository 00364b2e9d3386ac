"""Run in a process of its own: convert a model each way and print the peak memory beyond the libraries, in bytes.

Arguments: a directory to work in, the number of layers, the width.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import jax
import numpy as np

import ridgeline.trainer.checkpoint.param_slices
import ridgeline.trainer.pretrained
import ridgeline.trainer.start  # noqa: F401  (what the commands import when they run is part of the libraries)
from ridgeline.cli.commands.convert import from_hf, to_hf
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config, parameter_shapes


def peak_bytes() -> int:
    """Peak resident memory of this process alone: ru_maxrss would count the process that started it, too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main() -> None:
    root, layers, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = ModelConfig(vocab_size=30000, num_layers=layers, embed_dim=width, num_heads=8, head_dim=width // 8, mlp_dim=4 * width)
    shapes = parameter_shapes(model)
    rng = np.random.default_rng(0)

    def read(path: str, layer: int | None) -> np.ndarray:
        """Values that differ between parameters and layers, without drawing gigabytes of random numbers."""
        shape = shapes[path] if layer is None else shapes[path][1:]
        return np.broadcast_to(rng.random(shape[-1], np.float32), shape)

    jax.devices()
    before = peak_bytes()
    hf = root / "hf"
    hf.mkdir()
    export_weights(model, read, hf, "float32")
    (hf / "config.json").write_text(json.dumps(hf_config(model, "float32", {})))
    figures: dict[str, float] = {
        "largest_bytes": 4 * 30000 * width,
        "model_bytes": 4 * sum(int(np.prod(shape)) for shape in shapes.values()),
    }
    for name, command, arguments in (
        ("from_hf", from_hf, [hf, "--output", root / "run"]),
        ("to_hf", to_hf, [root / "run", root / "back"]),
    ):
        start_s = time.perf_counter()
        command.main([str(argument) for argument in [*arguments, "--json"]], standalone_mode=False)
        figures[f"{name}_bytes"] = peak_bytes() - before
        figures[f"{name}_s"] = round(time.perf_counter() - start_s, 1)
    print("figures " + json.dumps(figures))


main()
