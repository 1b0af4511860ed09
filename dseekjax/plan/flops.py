"""FLOPs of a traced program, loops multiplied out: XLA's own count takes the body of a loop once.

Matrix products and convolutions count, a multiply-add as two; what is recomputed counts each time. Shapes in a jaxpr
are those of whole arrays, except inside a `shard_map`, where they are a part's along its manual axes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr


def count_flops(program: ClosedJaxpr | Jaxpr) -> float:
    """FLOPs of one run on all devices together; of branches the one with the most, of unbounded loops one pass."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    # What nothing depends on, such as a product of which only the derivative is taken, is never computed.
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return _count(live)


def _count(program: ClosedJaxpr | Jaxpr) -> float:
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: JaxprEqn) -> float:
    params = equation.params
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = _shape(equation.invars[0])
            return _product(equation, [left[place] for place in contracted])
        case "ragged_dot" | "ragged_dot_general":
            return _product(equation, _shape(equation.invars[0])[-1:])
        case "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            return _product(equation, kernel) / features
        case "pallas_call" if "flops" in (params["metadata"] or {}):
            mapping = params["grid_mapping"]
            return float(params["metadata"]["flops"]) * math.prod(mapping.grid[axis] for axis in mapping.vmapped_dims)
        case "cond":
            return max(_count(branch) for branch in params["branches"])
    return _repeats(equation) * sum(_count(inner) for inner in _inner(params))


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _product(equation: JaxprEqn, sizes: Sequence[int]) -> float:
    return 2.0 * math.prod(_shape(equation.outvars[0])) * math.prod(sizes)


def _repeats(equation: JaxprEqn) -> int:
    params = equation.params
    match equation.primitive.name:
        case "scan":
            return int(params["length"])
        case "shard_map":
            # Its name differs among the JAX versions that are supported.
            axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
            return math.prod(params["mesh"].shape[axis] for axis in axes)
        case "pallas_call":
            return math.prod(params["grid_mapping"].grid)
    return 1


def _inner(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inner(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)
