"""A package outside of circuitscope that brings a mixer, a task, a score and an analysis."""
