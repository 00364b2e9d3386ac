"""Campaigns simulated (`ridge simulate`): the model, its inputs, the trials, the search for the best choice, the report."""
