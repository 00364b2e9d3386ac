"""`ridge bench`: measures one layer of the stack at a time, each on the real config. Imports JAX; perf/bench holds what needs none."""
