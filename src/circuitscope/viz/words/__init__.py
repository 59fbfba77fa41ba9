"""Results in words, one module per analysis: what its table amounts to, as lines for people to read.

The sentences of a circuit and of a verdict stay where they are made (`Circuit.sentences`, `Verdict.sentence`), because
they are part of what `find_circuit` and `verdict` give to those who call them in Python.
"""
