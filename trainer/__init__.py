"""State, step, optimiser, loop, checkpoint, evaluation."""
