"""Packages that `benchmarks/gpu.py` and its neighbours need on a GPU machine without a network; import this module before them.

If a package is missing, the process exits with one line. `python benchmarks/gpu_needs.py bench|train|maxtext` prints the packages to carry
as wheels, beside those of scripts/gpu_image.txt: `bench` for gpu.py, `train` for the other commands (training, calibration, compilation),
`maxtext` for that peer. `make gpu-rehearsal` downloads and tries them. Elsewhere: download with `pip download --no-deps
--only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64
-d wheels $(python benchmarks/gpu_needs.py train)`; install there with `pip install --no-index --no-deps --target site wheels/*.whl`, and
add `site` to PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = {"jax": "jax", "flax": "flax", "optax": "optax", "pydantic": "pydantic", "ruamel.yaml": "ruamel.yaml"}
"""Module -> package to install. No loader, checkpoint or writer runs here, so grain, orbax and tensorboard are not needed."""
BENCH = (
    "annotated-types==0.8.0", "pydantic==2.14.3", "pydantic-core==2.50.4", "ruamel.yaml==0.19.1", "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
)  # fmt: skip
"""2.9 MB."""
TRAIN = (
    *BENCH, "array-record==0.8.6", "cloudpickle==3.1.2", "grain==0.2.18", "nvidia-ml-py==13.580.65", "portpicker==1.6.0",
    "tensorboardX==2.6.5", "zstandard==0.25.0",
)  # fmt: skip
"""13 MB. Data of a run, TensorBoard, clocks of the GPU. xprof (32 MB) is only for TensorBoard's profile page."""
MAXTEXT = (
    "annotated-types==0.8.0", "aqtp==0.9.0", "array-record==0.8.6", "drjax==0.2.1", "einshape==1.0", "fastapi==0.165.0", "fire==0.7.1",
    "grain==0.2.18", "immutabledict==4.3.1", "maxtext==0.2.5", "ml-collections==1.1.0", "omegaconf==2.4.0", "opentelemetry-api==1.45.2",
    "pathwaysutils==0.1.13", "portpicker==1.6.0", "pydantic==2.14.3", "pydantic-core==2.50.4", "qwix==0.1.8", "ruamel.yaml==0.19.1",
    "starlette==1.10.0", "termcolor==3.3.0", "tokamax==0.0.17", "typing-extensions==4.16.0", "typing-inspection==0.4.5", "uvicorn==0.54.0",
    "xprof==2.24.2",
)  # fmt: skip
"""Packages with which MaxText trained a step on Python 3.12, with jax 0.11.2, flax 0.12.12, optax 0.2.8, orbax-checkpoint 0.12.8,
transformers 5.23.0, etils, tiktoken, sentencepiece, sympy and pillow. tokamax imports xprof (32 MB); maxtext has 14 MB (tokenizers)."""


def missing(needed: dict[str, str] = NEEDED) -> list[str]:
    """Return the packages to install, in order."""
    return [package for module, package in needed.items() if not _found(module)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package a submodule is in
        return False


SETS = {"bench": BENCH, "train": TRAIN, "maxtext": MAXTEXT}

if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in SETS]:
        print(f"usage: gpu_needs.py {' | '.join(SETS)}", file=sys.stderr)
        raise SystemExit(2)
    print("\n".join(SETS[sys.argv[1]]))
elif lacking := missing():
    print(f"gpu.py: not installed: {', '.join(lacking)} (pip install {' '.join(lacking)}; without a network: {__file__})", file=sys.stderr)
    raise SystemExit(2)
