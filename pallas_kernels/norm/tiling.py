"""How rows are cut into tiles, and how many programs share them."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

_TILE = 4096
"""Elements that are worked on together, if rows are narrow."""
_WIDEST_TILE = 8192
"""Wider rows do not fit into registers beside the sums over rows, so parts of them are worked on in turn: read from
memory once, and once or twice more from cache, as statistics come before gradients."""
_PART = 2048
_NARROWEST_TILE = 16
_MOST_WARPS = 16
_ELEMENTS_PER_WARP = 512
_WARPS_PER_CORE = 16
"""Programs are as many as give each core so many warps: each more is a row of partial sums more to write and read."""


@dataclass(frozen=True)
class Tiling:
    """Tiles of whole rows, each in parts side by side; sizes of parts are powers of two, as Triton wants."""

    rows: int
    width: int
    tile_rows: int
    columns: int
    """Of a part."""
    programs: int
    """Program i works on tiles i, i + programs, i + 2 programs, and so on."""
    num_warps: int

    @property
    def tiles(self) -> int:
        """How many there are; the last may lack rows."""
        return pl.cdiv(self.rows, self.tile_rows)

    @property
    def parts(self) -> int:
        """How many a tile has; the last may lack columns."""
        return pl.cdiv(self.width, self.columns)

    def place(self, tile: Array | int, part: Array | int) -> tuple[pl.Slice, pl.Slice]:
        """Where a part is."""
        return pl.ds(tile * self.tile_rows, self.tile_rows), pl.ds(part * self.columns, self.columns)

    def rows_inside(self, tile: Array | int) -> Array | None:
        """Which rows of a tile exist; None if all."""
        if self.rows % self.tile_rows == 0:
            return None
        return tile * self.tile_rows + jnp.arange(self.tile_rows, dtype=jnp.int32) < self.rows

    def columns_inside(self, part: Array | int) -> Array | None:
        """Which columns of a part exist; None if all.

        A part whose number only the kernel knows must not be the last.
        """
        if self.width % self.columns == 0 or not isinstance(part, int) or part < self.parts - 1:
            return None
        return part * self.columns + jnp.arange(self.columns, dtype=jnp.int32) < self.width

    def mask(self, tile: Array | int, part: Array | int) -> Array | None:
        """Which elements of a part exist, in what broadcasts to its shape; None if all."""
        rows, columns = self.rows_inside(tile), self.columns_inside(part)
        if rows is None:
            return None if columns is None else columns[None, :]
        return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def choose_tiling(rows: int, width: int, cores: int) -> Tiling:
    """For a GPU with so many cores.

    Args:
        rows: how many there are.
        width: of each.
        cores: streaming multiprocessors.
    """
    columns = max(_NARROWEST_TILE, pl.next_power_of_2(width))
    if columns > _WIDEST_TILE:
        tile_rows, columns, num_warps = 1, _PART, _MOST_WARPS
    else:
        tile_rows = max(1, _TILE // columns)
        num_warps = tile_rows * columns // _ELEMENTS_PER_WARP
    programs = min(pl.cdiv(rows, tile_rows), cores * _WARPS_PER_CORE // num_warps)
    return Tiling(rows, width, tile_rows, columns, programs, num_warps)
