"""Benchmarks of one layer at a time: what a config's step consists of, the ladder, stored results and the guard over them. No JAX here."""
