"""Small charts for the interactive report, one module per analysis: what its table amounts to, as numbers to draw."""
