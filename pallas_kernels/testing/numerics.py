"""How far a result is from a more exact one."""

import numpy as np
from jaxtyping import ArrayLike


def relative_error(found: ArrayLike, exact: ArrayLike) -> float:
    """‖found - exact‖ / ‖exact‖ in float64, by the Frobenius norm; NaN and infinity are infinitely far from all else.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = (np.asarray(x).astype(np.float64) for x in (found, exact))
    if a.shape != b.shape:
        raise ValueError(f"relative_error: shape {a.shape} is not {b.shape}")
    if not np.isfinite(a).all():
        return float("inf")
    difference, norm = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm
