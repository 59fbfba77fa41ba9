"""Kernels of our own for a GPU, in Triton. `kernels.backends` imports a file of this folder when a GPU tensor needs it.

Triton comes with torch's CUDA builds, so no compiler is needed; the package works without it, and then torch computes.
Every kernel computes in float32 or float64 and starts one program for each sequence and block of channels, which walks
through the positions. No kernel adds to memory that another program writes: where a gradient is a sum over programs,
each writes its summand and torch adds them up in a fixed order. So the same input gives the same bits.
"""
