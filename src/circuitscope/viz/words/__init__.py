"""Results in words, one module per analysis: what its table amounts to, as lines for people to read.

A circuit's sentences and a verdict's stay where they are made (`Circuit.sentences`, `Verdict.sentence`): they are part
of what `find_circuit` and `verdict` give to those who call them in Python.
"""
