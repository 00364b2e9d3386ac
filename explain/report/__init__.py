"""One self-contained page about a run, or about several side by side."""
