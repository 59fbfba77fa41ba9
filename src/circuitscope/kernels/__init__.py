"""Numeric primitives: tensors in, tensors out. No modules, no hooks, no parameters."""
