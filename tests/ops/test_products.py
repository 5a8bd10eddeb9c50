"""Matrix products against NumPy: vectors, stacks, empty axes, exact integers, equations of Einsum."""

import numpy as np
import pytest
from numpy_node import assert_node_gives

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)),
        ((3,), (3, 2)),
        ((2, 3), (3,)),
        ((4, 1, 2, 3), (5, 3, 2)),
        ((3,), (4, 3, 2)),
        ((4, 2, 3), (3,)),
        ((2, 0), (0, 3)),
        ((0, 2), (2, 3)),
        ((2, 3, 0), (0, 4)),
    ],
)
def test_matmul(a, b):
    x, y = rng.normal(size=a).astype(np.float32), rng.normal(size=b).astype(np.float32)
    assert_node_gives("MatMul", [x, y], np.matmul(x, y), tolerance=1e-6)
    # Products beyond the 24 bits that a float32 holds exactly.
    x, y = rng.integers(-50000, 50000, a).astype(np.int32), rng.integers(-10000, 10000, b).astype(np.int32)
    assert_node_gives("MatMul", [x, y], np.matmul(x, y))


@pytest.mark.parametrize("turned", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("c", [None, (), (4,), (3, 1), (3, 4)])
def test_gemm(turned, c):
    a, b = rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    given = [a.T if turned[0] else a, b.T if turned[1] else b]
    attrs = {"transA": turned[0], "transB": turned[1], "alpha": 0.5, "beta": -2.0}
    expected = 0.5 * (a @ b)
    if c is not None:
        given.append(np.asarray(rng.normal(size=c), np.float32))
        expected = expected - 2 * given[-1]
    assert_node_gives("Gemm", given, expected, attrs, tolerance=1e-6)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ij,jk->ki", [(2, 3), (3, 4)]),
        ("b...i , ...ij -> b...j", [(2, 5, 3), (5, 3, 4)]),
        ("...ij,...jk->...ik", [(5, 2, 3), (3, 4)]),
        ("ii->i", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("bij,bjk,bkl->bil", [(2, 3, 4), (2, 4, 5), (2, 5, 2)]),
        ("i,i", [(3,), (3,)]),
        ("i,j->ij", [(3,), (2,)]),
        ("Ab->bA", [(2, 3)]),
        ("bAa", [(2, 3, 4)]),
        ("bhqd,bhkd->bhqk", [(1, 2, 3, 4), (1, 2, 5, 4)]),
        ("iij->j", [(2, 2, 3)]),
        ("ij->", [(2, 3)]),
        (",ij->ij", [(), (2, 3)]),
    ],
)
def test_einsum(equation, shapes):
    xs = [np.asarray(rng.normal(size=shape), np.float32) for shape in shapes]
    assert_node_gives("Einsum", xs, np.einsum(equation, *xs), {"equation": equation}, tolerance=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_determinants(n):
    x = rng.normal(size=(4, n, n)).astype(np.float32)
    x[0, 0, 0] = 0  # a pivot that must be looked for
    x[1, :, 0] = 0  # a singular matrix
    assert_node_gives("Det", [x], np.linalg.det(x), tolerance=1e-5)
