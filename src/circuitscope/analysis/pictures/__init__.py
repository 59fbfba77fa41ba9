"""Mixing matrices of chosen examples at chosen checkpoints, as data: figures and the report draw them."""
