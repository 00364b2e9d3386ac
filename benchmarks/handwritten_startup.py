"""The hand-written script that `startup.py` starts: parameters, optimizer and one step, without Ridgeline.

`python handwritten_startup.py STARTED` prints the seconds from STARTED (wall clock, s since 1970) to the end of the first step, in parts.
"""

import json
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from handwritten import Tree, hand_written_step

VOCAB, LAYERS, WIDTH, HEADS, MLP, ROWS, LENGTH = 32000, 4, 512, 8, 1376, 4, 512


def init(key: jax.Array) -> Tree:
    """Random normal parameters."""
    shapes = {
        "embedding": (VOCAB, WIDTH),
        "output": (WIDTH, VOCAB),
        "final_norm": {"scale": (WIDTH,)},
        "blocks": {
            "attention_norm": {"scale": (LAYERS, WIDTH)},
            "mlp_norm": {"scale": (LAYERS, WIDTH)},
            "attention": dict.fromkeys(("query", "key", "value"), (LAYERS, WIDTH, HEADS, WIDTH // HEADS))
            | {"out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH)},
            "mlp": {"gate": (LAYERS, WIDTH, MLP), "up": (LAYERS, WIDTH, MLP), "down": (LAYERS, MLP, WIDTH)},
        },
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([0.02 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])


model = SimpleNamespace(num_layers=LAYERS, norm_eps=1e-5, rope_theta=10000.0, tie_embeddings=False)
adamw = SimpleNamespace(clip_norm=1.0, learning_rate=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
config = SimpleNamespace(model=model, optimizer=adamw, precision=SimpleNamespace(compute="float32"))
begin_s = float(sys.argv[1])
parts = {"launch": time.time() - begin_s}
optimizer, step = hand_written_step(config, "scan")
params = jax.jit(init)(jax.random.key(0))
state = jax.block_until_ready((params, jax.jit(optimizer.init)(params)))
parts["init"] = time.time() - begin_s - sum(parts.values())
tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
program = step.lower(state, batch).compile()
parts["compile"] = time.time() - begin_s - sum(parts.values())
state, loss = program(state, batch)
float(loss)
jax.block_until_ready(state)
parts["first_step"] = time.time() - begin_s - sum(parts.values())
print(json.dumps(parts), flush=True)
