"""Analyses over the checkpoints of a run: which checkpoints, in which order, and the tables that keep the rows."""
