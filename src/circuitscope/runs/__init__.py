"""Runs as records on disk: config, checkpoints, resume points, metrics, status. Training writes them."""
