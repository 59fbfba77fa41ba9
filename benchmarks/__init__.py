"""Side-by-side ratios and absolute limits: `python -m benchmarks`. A missed limit is a row, never an error."""
