"""From figures to a decision: facts of a run, rules with declared thresholds, findings ranked by their possible gain."""
