"""The toy example of the error tolerance (FedCova, arXiv 2603.04062, its appendix): two classes in the plane.

Both are zero-mean Gaussians, elongated along different axes; the tolerance adds eps^2/d to every variance:

    Sigma(eps^2) = Sigma + (eps^2 / d) I,   d = 2

The covariances are diagonal, so all that follows is exact.  They decide for the class with the higher density, hence
the boundary is  c_x x^2 + c_y y^2 = c  with  c_i = 1/a_i - 1/b_i  and  c = ln(det B / det A),  a_i and b_i being the
variances of the two classes after the tolerance was added.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

A, B = (4.0, 0.2), (0.2, 3.0)  # the paper's variances along x and y
EPS2 = (0.0, 2.0, 8.0)  # its three panels
D = 2


def tolerant(variances: tuple[float, float], eps2: float) -> tuple[float, float]:
    """The variances with the tolerance added.  Raises ValueError for a negative one."""
    if eps2 < 0:
        raise ValueError(f"eps2 is a squared tolerance and cannot be {eps2}")
    return variances[0] + eps2 / D, variances[1] + eps2 / D


def density(x: Floats, y: Floats, variances: tuple[float, float]) -> Floats:
    """Of the zero-mean Gaussian with these variances, at points of any (equal) shapes."""
    exponent = -(np.square(x) / variances[0] + np.square(y) / variances[1]) / 2
    return np.exp(exponent) / (2 * math.pi * math.sqrt(variances[0] * variances[1]))


class Boundary(NamedTuple):
    """Where both densities are equal: c_x x^2 + c_y y^2 = c."""

    c_x: float
    c_y: float
    c: float

    @property
    def kind(self) -> str:
        """hyperbola, or ellipse (of which a circle is one)."""
        return "hyperbola" if self.c_x * self.c_y < 0 else "ellipse"

    @property
    def slope(self) -> float:
        """Of a hyperbola's asymptotes y = +- slope x."""
        return math.sqrt(-self.c_x / self.c_y)


def boundary(eps2: float) -> Boundary:
    a, b = tolerant(A, eps2), tolerant(B, eps2)
    return Boundary(1 / a[0] - 1 / b[0], 1 / a[1] - 1 / b[1], math.log(b[0] * b[1] / (a[0] * a[1])))


def samples(eps2: float, count: int) -> tuple[Floats, Floats]:
    """[count, 2] features of each class, with the tolerance as noise on them; the same standard normal draws for every
    eps2, so that panels differ by it alone."""
    normal = np.random.Generator(np.random.PCG64(0)).standard_normal((2, count, 2))
    return (
        normal[0] * np.sqrt(tolerant(A, eps2)),
        normal[1] * np.sqrt(tolerant(B, eps2)),
    )
