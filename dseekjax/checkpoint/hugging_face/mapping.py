"""How our parameters lie in the tensors of another library, as data that is read in both directions."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Index = tuple[slice, ...]
ReadSlice = Callable[[Index], np.ndarray]


@dataclass(frozen=True)
class Mapped:
    """One of our parameters in one tensor of theirs, or, with `{layer}` in its name, in one tensor of each layer."""

    ours: str
    """As `checkpoint.layout.flatten` names it."""
    theirs: str
    axes: str
    """Our axes and theirs, where those in parentheses are one: `e h d -> (h d) e`. The axis of layers is left out.

    They are v(ocabulary), p(ositions), e(mbed), h(eads), (head_)d(im) and m(lp).
    """
    part: int = 0
    """Which of the `parts` that lie side by side along the last axis of the tensor."""
    parts: int = 1

    @property
    def is_per_layer(self) -> bool:
        return "{layer}" in self.theirs

    def names(self, num_layers: int) -> list[str]:
        """The names of the tensors, in the order of layers."""
        return [self.theirs.format(layer=i) for i in range(num_layers)] if self.is_per_layer else [self.theirs]

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the whole tensor, all its parts, for ours of `shape` (of one layer)."""
        sizes = self._sizes(shape)
        whole = [math.prod(sizes[axis] for axis in group) for group in self._their_groups]
        return (*whole[:-1], whole[-1] * self.parts)

    def read(self, read_slice: ReadSlice, shape: Sequence[int], index: Index) -> np.ndarray:
        """What is at `index` of ours, of `shape` (of one layer), reading no row and column that is not needed.

        Args:
            read_slice: gives a slice of their tensor.
            shape: of our whole array.
            index: a slice for each of its axes.
        """
        sizes = self._sizes(shape)
        wanted = {axis: slice(*part.indices(sizes[axis])) for axis, part in zip(self._our_axes, index, strict=True)}
        bounds, read_shape, inner = [], [], []
        for i, (first, *rest) in enumerate(self._their_groups):
            stride = math.prod(sizes[axis] for axis in rest)
            is_last = i == len(self._their_groups) - 1
            start = self.part * sizes[first] * stride if is_last else 0
            bounds.append(slice(start + wanted[first].start * stride, start + wanted[first].stop * stride))
            read_shape += [wanted[first].stop - wanted[first].start, *(sizes[axis] for axis in rest)]
            inner += [slice(None), *(wanted[axis] for axis in rest)]
        block = read_slice(tuple(bounds)).reshape(read_shape)[tuple(inner)]
        flat = self._their_axes
        return block.transpose([flat.index(axis) for axis in self._our_axes])

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Our array (of one layer) as this part of their tensor."""
        sizes = self._sizes(array.shape)
        turned = array.transpose([self._our_axes.index(axis) for axis in self._their_axes])
        return turned.reshape([math.prod(sizes[axis] for axis in group) for group in self._their_groups])

    @property
    def _our_axes(self) -> list[str]:
        return self.axes.partition(" -> ")[0].split()

    @property
    def _their_groups(self) -> list[list[str]]:
        text = self.axes.partition(" -> ")[2]
        return [group.strip("()").split() for group in re.findall(r"\([^)]+\)|\S+", text)]

    @property
    def _their_axes(self) -> list[str]:
        return [axis for group in self._their_groups for axis in group]

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        return dict(zip(self._our_axes, shape, strict=True))


def per_layer(prefix: str, *rows: tuple[Any, ...]) -> tuple[Mapped, ...]:
    """Rows of a table of what each layer holds; `prefix` comes before their names."""
    return tuple(Mapped(f"runs.0.{ours}", prefix + theirs, *rest) for ours, theirs, *rest in rows)
