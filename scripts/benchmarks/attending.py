"""How fast attention is on this machine's CPU, forward and backward, next to its definition in plain JAX.

In turns in one process: what `auto` takes, and a masked softmax of the whole score matrix as XLA makes it of einsums,
both causal and within documents. The ratio is the median of pairs of runs, one right after the other; memory is what
the compiled programs announce for temporaries.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pallas_kernels.attention import attention, choose_implementation, describe
from pallas_kernels.dispatch import device_at_hand

sys.path.insert(0, str(Path(__file__).parent))
from quiet import Stopwatch, Timed, median_ratio

LENGTHS = (256, 1024, 2048)


def plain(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """The definition, `[batch, length, heads, dim]`."""
    length = query.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool)) & (ids[:, :, None] == ids[:, None, :])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def ours(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """What `auto` takes."""
    return attention(query, key, value, query_segment_ids=ids, key_segment_ids=ids)


def compiled(attend: Callable[..., jax.Array], *inputs: jax.Array) -> Any:
    """Attention and its gradients, compiled."""

    def run(*inputs: jax.Array) -> Any:
        *arrays, ids = inputs
        out, pull_back = jax.vjp(lambda *x: attend(*x, ids), *arrays)
        return pull_back(out)

    return jax.jit(run).lower(*inputs).compile()


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("scripts/benchmark_attention", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each is run")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    table = Table(title=f"attention on CPU, forward and backward, 8 heads of 64, {given.dtype}")
    for column in ("sequences", "what runs", "ms", "speed to plain", "MiB", "memory to plain"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(0)
    for length in track(LENGTHS, "timing", console=Console(stderr=True), transient=True):
        batch = 4096 // length
        shape = (batch, length, 8, 64)
        arrays = [jnp.asarray(rng.standard_normal(shape, np.float32), given.dtype) for _ in range(3)]
        ids = jnp.broadcast_to(jnp.arange(length) // (length // 4), (batch, length))
        programs = [compiled(attend, *arrays, ids) for attend in (plain, ours)]
        laps: list[list[Timed]] = [[], []]
        for program in programs:
            jax.block_until_ready(program(*arrays, ids))
        watch = Stopwatch()
        for _ in range(given.rounds):
            for program, times in zip(programs, laps, strict=True):
                jax.block_until_ready(program(*arrays, ids))
                times.append(watch.lap())
        case, _ = describe(*arrays, ids, ids)
        memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
        table.add_row(
            f"{batch} of {length}",
            choose_implementation(case, device_at_hand()),
            f"{1e3 * np.median([lap.seconds for lap in laps[1]]):.0f}",
            f"{median_ratio(*laps):.2f}",
            f"{memory[1] / 2**20:.0f}",
            f"{memory[1] / memory[0]:.2f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
