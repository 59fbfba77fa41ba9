"""Random numbers by address: draw `j` of example `i` is a pure function of (key, i, j).

The generator is SplitMix64 over a counter. It has no state, so any example of any split can be made alone
and in any order, and the numbers do not depend on the version of numpy.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32, _S11 = (np.uint64(s) for s in (30, 27, 31, 32, 11))


def stream_key(*parts: object) -> int:
    """A 64-bit key from anything with a stable `repr`: names, versions, seeds, splits."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def words(key: int, examples: I64, draws: int) -> U64:
    """Uniform 64-bit words [example, draw]: SplitMix64 at counter example · draws + draw."""
    counter = examples.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
    x: U64 = (counter * _GAMMA + np.uint64(key)).astype(np.uint64, copy=False)
    x ^= x >> _S30
    x *= _MIX_1
    x ^= x >> _S27
    x *= _MIX_2
    x ^= x >> _S31
    return x


def uniform(w: U64) -> NDArray[np.float64]:
    """Words as floats in (0, 1): never 0, so a logarithm is safe."""
    return ((w >> _S11).astype(np.float64) + 0.5) * 2.0**-53


def normal(w: U64) -> NDArray[np.float64]:
    """Words as standard normal variates, by the inverse of the normal distribution function."""
    from scipy.special import ndtri  # loaded on first use, because it takes a second

    found: NDArray[np.float64] = ndtri(uniform(w))
    return found


def below(w: U64, n: int) -> I64:
    """Words as integers in [0, n), n < 2^32, by multiply and shift (bias below n / 2^32)."""
    return (((w >> _S32) * np.uint64(n)) >> _S32).astype(np.int64)


def order(w: U64) -> I64:
    """A random permutation of each row."""
    return np.argsort(w, axis=1)


def distinct(w: U64, n: int) -> I64:
    """k distinct integers in [0, n) per row, in random order, from 2k words.

    This is Floyd's algorithm on all rows at once. It takes O(k²) comparisons per row and no array of size n,
    whereas tiling the vocabulary for each example would need O(n) memory.
    """
    k = w.shape[1] // 2
    chosen = np.empty((len(w), k), dtype=np.int64)
    for j in range(k):
        top = n - k + j
        drawn = (((w[:, j] >> _S32) * np.uint64(top + 1)) >> _S32).astype(np.int64)
        taken = (chosen[:, :j] == drawn[:, None]).any(axis=1)
        chosen[:, j] = np.where(taken, top, drawn)
    return np.take_along_axis(chosen, order(w[:, k:]), axis=1)
