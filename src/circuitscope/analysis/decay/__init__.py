"""Decay of off-diagonal terms: profiles and rates, transition products, the reach of gradients, as rows of a table."""
