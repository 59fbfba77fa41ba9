"""Training: the loop, the run on disk, checkpoints and resume points."""
