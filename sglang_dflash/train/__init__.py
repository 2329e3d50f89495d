"""Training of drafters: data made by the target itself, the training loop, checkpoints and their reports."""
