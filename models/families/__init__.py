"""The model families, one module each."""
