"""A random order of any number of indices, computed index by index."""

import math

import numpy as np
from jaxtyping import Int

ROUNDS = 6


def permute(indices: Int[np.ndarray, "*shape"], size: int, key: int) -> Int[np.ndarray, "*shape"]:
    """Maps indices of `range(size)` through the permutation that a key names, of which no list is ever held.

    A Feistel network over pairs of a number below a and one below b, ab being little more than `size`, walked along
    its cycles until the result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        indices: in `[0, size)`.
        size: how many indices are permuted.
        key: uint64.
    """
    low = math.isqrt(size - 1) + 1
    high = -(-size // low)
    with np.errstate(over="ignore"):
        round_keys = mix(np.uint64(key) + np.arange(ROUNDS, dtype=np.uint64))
    value = _encipher(np.asarray(indices, np.uint64), low, high, round_keys)
    while (outside := value >= size).any():
        value[outside] = _encipher(value[outside], low, high, round_keys)
    return value.astype(np.int64)


def _encipher(value: np.ndarray, low: int, high: int, round_keys: np.ndarray) -> np.ndarray:
    right, left = np.divmod(value, np.uint64(low))
    for i, round_key in enumerate(round_keys):
        # One bit less, so that the sum stays within 64.
        added = left + (mix(right ^ round_key) >> np.uint64(1))
        left, right = right, added % np.uint64(high if i % 2 else low)
    return right * np.uint64(low) + left


def mix(value: np.ndarray) -> np.ndarray:
    """Scrambles 64 bits: the finaliser of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
