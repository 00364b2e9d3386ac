"""State, step, optimizers, loop, checkpoints, evaluation, ahead-of-time compilation."""
