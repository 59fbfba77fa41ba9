"""Numeric primitives: functions from tensors to tensors, without modules, hooks or parameters."""
