"""Step-time analysis of XLA profiles: read traces, assign work to steps, account for the time of every device."""
