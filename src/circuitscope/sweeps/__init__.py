"""Sweeps: grids of runs, executors that train them, and one table of results that counts as done."""
