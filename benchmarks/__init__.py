"""Side-by-side ratios and absolute limits: `python -m benchmarks`. A limit that is missed is a row, never an error."""
