"""The ways in which a sequence that is split over `tensor` is brought together and summed apart."""

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float

from dseekjax.parallel.placement import pass_on

AXIS = "tensor"


class WholeSequences:
    """Sequences that are not split: nothing to gather, sums are reduced everywhere."""

    def parts(self, x: Float[Array, "batch seq ..."]) -> Sequence[tuple[jax.Array | int, jax.Array]]:
        return [(0, x)]

    def total(self, part_at: Callable[[jax.Array | int, int], jax.Array], length: int) -> jax.Array:
        return jax.lax.psum(part_at(0, length), AXIS)


class AtOnce:
    """One all-gather, one reduce-scatter."""

    def parts(self, x: Float[Array, "batch seq ..."]) -> Sequence[tuple[jax.Array | int, jax.Array]]:
        return [(0, jax.lax.all_gather(x, AXIS, axis=1, tiled=True))]

    def total(self, part_at: Callable[[jax.Array | int, int], jax.Array], length: int) -> jax.Array:
        return jax.lax.psum_scatter(part_at(0, length), AXIS, scatter_dimension=1, tiled=True)


class RoundARing:
    """Part by part, each hop hidden behind the work on the part before (Wang et al. 2023, ASPLOS, "Overlap")."""

    def parts(self, x: Float[Array, "batch seq ..."]) -> Sequence[tuple[jax.Array | int, jax.Array]]:
        size, rank, length = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS), x.shape[1]
        found: list[tuple[jax.Array | int, jax.Array]] = []
        for hop in range(size):
            found.append(((rank - hop) % size * length, x))
            if hop < size - 1:
                x = pass_on(x, AXIS)
        return found

    def total(self, part_at: Callable[[jax.Array | int, int], jax.Array], length: int) -> jax.Array:
        size, rank = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
        part = length // size
        # The sum for a device starts at its neighbour and gathers a term at every stop on its way home.
        sums = part_at((rank - 1) % size * part, part)
        for hop in range(1, size):
            sums = pass_on(sums, AXIS) + part_at((rank - 1 - hop) % size * part, part)
        return sums
