"""Circuit scores: edges and weights on them, copying and composition of heads, and all of it as rows of a table."""
