"""One of the two processes of test_local_tier.py, each on a 'node' of its own: argv = process, port, corpus, step, root of a run ...

Trains the runs one after another; ROOT/run is the run directory, ROOT/node_P the disk of process P. step: of the local checkpoint after
which process 1 is killed; 0: never.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
process, port, corpus, kill_at = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
roots = [Path(argument) for argument in sys.argv[5:]]

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

from ridgeline.configs.schema import Config  # noqa: E402
from ridgeline.trainer.run import train  # noqa: E402


def config(root: Path) -> Config:
    return Config.model_validate(
        {
            "name": "small",
            "run_dir": str(root / "run"),
            "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 32},
            "precision": {"compute": "float32"},
            "mesh": {"fsdp": 2},
            "data": {"train": [{"path": str(corpus)}], "seq_len": 32, "batch_size": 8},
            "trainer": {"steps": 14, "log_every": 1},
            "checkpoint": {"every": 6, "local": {"directory": str(root / f"node_{process}"), "every": 2}},
            "logging": {"tensorboard": False},
        }
    )


def killed() -> None:
    """End this process as a failure would, once both processes have sent a local checkpoint from `kill_at` on."""
    while True:
        time.sleep(0.002)
        copies = [(roots[0] / f"node_{1 - sender}").glob(f"*/process_{sender:05d}/step_*/integrity.json") for sender in (0, 1)]
        steps = [{int(path.parent.name[5:]) for path in parts if "." not in path.parent.name} for parts in copies]
        found = steps[0] & steps[1]
        if any(step >= kill_at for step in found) and (roots[0] / "run/checkpoints/step_00000006/integrity.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)


if kill_at and process == 1:
    threading.Thread(target=killed, daemon=True).start()
for root in roots:
    train(config(root), command=["test"])
jax.distributed.shutdown()
