"""Least squares with coefficients of at least 0, for many problems that differ in one column.

The search for transitions asks for thousands of shapes how much better a curve is fitted if the shape is added to the
same columns. Lawson and Hanson's method starts each of these problems where the common columns alone had ended, so it
needs a few exchanges of columns instead of all of them.
"""

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from circuitscope.kernels.numba_simd import serial, task

Array = np.ndarray
_NO_GAIN = 1e-11  # a column whose correlation with what is left is below this share does not enter
_DEPENDENT = 1e-9  # nor one of which the columns that are in leave less than this share


def squares_with_one_more(
    columns: Float[Array, "row column"],
    target: Float[Array, " row"],
    along: Float[Array, "shape row"],
    beyond: Float[Array, " shape"],
    target_beyond: Float[Array, " shape"],
) -> Float[Array, " shape"]:
    """min ‖X c + s a − y‖² over c, a ≥ 0, for each column s beside X.

    A shape s has the entries `along` in the rows of X and y, and `beyond` in a further row that is 0 in X and
    `target_beyond` in y.
    """
    start, _ = nnls(columns, target)
    out = np.empty(len(along))
    _solve_all(
        np.ascontiguousarray(columns.T),
        np.ascontiguousarray(target),
        np.ascontiguousarray(along),
        np.ascontiguousarray(beyond),
        np.ascontiguousarray(target_beyond),
        start,
        out,
    )
    return out


@task
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@serial
def _solve_all(columns, target, along, beyond, target_beyond, start, out):  # type: ignore[no-untyped-def]
    n, m = columns.shape[0] + 1, columns.shape[1] + 1
    rows, y = np.zeros((n, m)), np.empty(m)  # rows[j] is column j
    for i in range(m - 1):
        y[i] = target[i]
        for j in range(n - 1):
            rows[j, i] = columns[j, i]
    for shape in range(len(out)):
        for i in range(m - 1):
            rows[n - 1, i] = along[shape, i]
        rows[n - 1, m - 1] = beyond[shape]
        y[m - 1] = target_beyond[shape]
        out[shape] = _solve(rows, y, start)


@task
def _solve(rows, y, start):  # type: ignore[no-untyped-def]
    """The smallest sum of squares, by exchanges of one column at a time."""
    n, m = rows.shape
    x, length = np.zeros(n), np.empty(n)
    inside, refused = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    for j in range(n):
        length[j] = np.sqrt(_dot(rows[j], rows[j]))
        if j < n - 1 and start[j] > 0.0:
            x[j], inside[j] = start[j], True
    size = np.sqrt(_dot(y, y))
    order, wanted = np.zeros(n, np.int64), np.zeros(n)
    basis, upper, seen, rest = np.zeros((m, m)), np.zeros((m, m)), np.zeros(m), np.zeros(m)
    for _ in range(3 * n):
        for i in range(m):
            rest[i] = y[i]
        for j in range(n):
            if inside[j]:
                for i in range(m):
                    rest[i] -= x[j] * rows[j, i]
        best, most = -1, _NO_GAIN
        for j in range(n):
            if not inside[j] and not refused[j]:
                gain = _dot(rows[j], rest) / (length[j] * size + 1e-300)
                if gain > most:
                    best, most = j, gain
        if best < 0:
            break
        inside[best], entered = True, False
        while True:
            # least squares on the columns that are in, by Gram and Schmidt, each taken off twice; the new one is last
            k = 0
            for j in range(n):
                if inside[j] and j != best:
                    order[k] = j
                    k += 1
            if inside[best]:
                order[k] = best
                k += 1
            independent = k <= m
            for a in range(k if independent else 0):
                for i in range(m):
                    basis[a, i] = rows[order[a], i]
                    upper[i, a] = 0.0
                for b in range(2 * a):
                    part = _dot(basis[b % a], basis[a])
                    upper[b % a, a] += part
                    for i in range(m):
                        basis[a, i] -= part * basis[b % a, i]
                left = np.sqrt(_dot(basis[a], basis[a]))
                if left <= _DEPENDENT * length[order[a]]:
                    independent = False
                    break
                upper[a, a] = left
                for i in range(m):
                    basis[a, i] /= left
                seen[a] = _dot(basis[a], y)
            if not independent:
                break
            for a in range(k - 1, -1, -1):
                value = seen[a]
                for b in range(a + 1, k):
                    value -= upper[a, b] * wanted[order[b]]
                wanted[order[a]] = value / upper[a, a]
            if not entered and wanted[best] <= 0.0:
                break  # rounding alone let it in
            entered = True
            step, first = 1.0, -1  # how far one can go until a coefficient is 0, and which
            for a in range(k):
                j = order[a]
                if wanted[j] <= 0.0 and (first < 0 or x[j] / (x[j] - wanted[j]) < step):
                    step, first = x[j] / (x[j] - wanted[j]), j
            for a in range(k):
                j = order[a]
                x[j] += step * (wanted[j] - x[j])
                if j == first or (first >= 0 and x[j] <= 0.0):
                    x[j], inside[j] = 0.0, False
            if first < 0:
                break
        if entered:
            for j in range(n):
                refused[j] = False
        else:
            inside[best], refused[best] = False, True
    return _dot(rest, rest)
