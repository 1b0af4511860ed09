"""A random order of any number of indices, computed index by index."""

import numpy as np
from jaxtyping import Int

ROUNDS = 6


def permute(
    indices: Int[np.ndarray, "*shape"], size: int, keys: Int[np.ndarray, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    """Maps each index of `range(size)` through the permutation that its key names.

    A Feistel network over the next even power of two, walked along its cycles until the result is in range (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains"), so that no list of indices is ever held.

    Args:
        indices: in `[0, size)`.
        size: how many indices are permuted.
        keys: uint64; equal keys share a permutation.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    value, keys = np.asarray(indices, np.uint64), np.asarray(keys, np.uint64)
    value = _encipher(value, keys, half)
    while (outside := value >= size).any():
        value[outside] = _encipher(value[outside], keys[outside], half)
    return value.astype(np.int64)


def _encipher(value: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = value >> np.uint64(half), value & mask
    for i in range(ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(keys + np.uint64(i))) & mask)
    return (left << np.uint64(half)) | right


def mix(value: np.ndarray) -> np.ndarray:
    """Scrambles 64 bits: the finaliser of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
