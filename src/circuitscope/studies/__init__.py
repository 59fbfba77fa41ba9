"""Studies: a claim of a paper, criteria that were fixed before the runs, and what the result tables say of them."""
