"""How fast a train step is on this machine's CPU, next to a plain JAX one and to the fastest matrix product.

In turns in one process: our step and a tuned page of plain JAX, scripts/references/plain_step.py, compiled with the
options that are best for it; our Trainer, with new batches, metrics written to disk and lines for the terminal,
between two stretches of our step alone; and a product of two 4096 x 4096 matrices, the best of which is the peak. Each
figure is the median of those of all rounds; ours to plain is that of pairs of steps, one right after the other. A step
during which other processes used more than 0.12 of a core does not count, unless fewer than three of its kind and
round would be left. FLOPs are 6 N + 12 layers x width x sequence per token, attention counted whole, as is usual in
such comparisons; the plain page computes it whole too, our step skips blocks that causality hides where there are
several.

By default it is the small job in float32, one round: two minutes on two cores. --all is every job and dtype, three
rounds of each: three quarters of an hour or more.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dseekjax.allocator import allocator_in_force, best_allocator, restart_with

sys.path.insert(0, str(Path(__file__).parent.parent / "references"))
sys.path.insert(0, str(Path(__file__).parent))
from children import run
from quiet import Stopwatch, Timed, counted, median_ratio


@dataclass(frozen=True)
class Job:
    vocabulary: int
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    def flops(self, num_parameters: int) -> float:
        return (6 * num_parameters + 12 * self.layers * self.width * self.sequence) * self.tokens


JOBS = {
    "small": Job(8192, 6, 384, 6, 256, 8),
    "vocabulary": Job(50304, 6, 384, 6, 256, 8),
    "gpt2_124m": Job(50304, 12, 768, 12, 512, 2),
}
DTYPES = ("float32", "bfloat16")
STEPS_PER_ROUND = 6
WARM_UP = 2
LAST = 2
"""Steps of a Trainer whose records arrive together, when nothing is left to wait for."""


def config_of(job: Job, dtype: str) -> Any:
    from dseekjax.config import load_config

    return load_config(
        overrides=[
            f"model.vocabulary_size={job.vocabulary}",
            f"model.num_layers={job.layers}",
            f"model.embed_dim={job.width}",
            f"model.attention.num_heads={job.heads}",
            f"model.attention.head_dim={job.width // job.heads}",
            f"model.feed_forward.hidden_dim={4 * job.width}",
            f"model.max_positions={job.sequence}",
            f"data.sequence_length={job.sequence}",
            f"train.global_batch_size={job.batch}",
            f"train.steps={WARM_UP + STEPS_PER_ROUND + LAST}",
            f"precision.compute_dtype={dtype}",
        ]
    )


def random_batch(job: Job, seed: int = 0) -> dict[str, np.ndarray]:
    shape = (job.batch, job.sequence)
    tokens = np.random.default_rng(seed).integers(0, job.vocabulary, (job.batch, job.sequence + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_weights": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(job.sequence, dtype=np.int32), shape).copy(),
    }


@dataclass(frozen=True)
class Made:
    """A step that is ready to run."""

    step: Callable[[], float]
    """Makes one step; returns its loss."""
    announced_bytes: int
    num_parameters: int
    trainer: Callable[[list[Any]], Any] | None = None
    """Makes a Trainer of the same program, with the hooks that it is given."""


def our_step(job: Job, dtype: str) -> Made:
    import jax

    from dseekjax.models.batch import Batch
    from dseekjax.training.program import build_program
    from dseekjax.training.trainer import Trainer

    program = build_program(config_of(job, dtype), jax.devices()[:1])
    state = program.init()
    batch = jax.device_put(Batch(**random_batch(job)))
    compiled = program.train_step.lower(program.state_shape, program.batch_shape).compile()

    def step() -> float:
        nonlocal state
        state, metrics = program.train_step(state, batch)
        return float(metrics["loss"])

    class Random:
        def state(self, batch: int) -> dict[str, Any]:
            return {}

        def start(self, state: Any) -> Any:
            return (random_batch(job, seed) for seed in itertools.count())

    return Made(
        step,
        announced_bytes(compiled),
        sum(x.size for x in jax.tree.leaves(state.params)),
        lambda hooks: Trainer(program, Random(), hooks=hooks),
    )


def plain_step(job: Job, dtype: str) -> Made:
    """The plain page's."""
    import functools

    import jax
    import jax.numpy as jnp
    import plain_step as plain

    from dseekjax.parallel.compiler import ONEDNN, VECTOR_WIDTH

    params = plain.init(job.vocabulary, job.sequence, job.layers, job.width, job.heads, 4 * job.width)
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    batch = jax.device_put(random_batch(job))
    update = functools.partial(plain.update, mean_loss=plain.quick_mean_loss, dtype=dtype)
    jitted = jax.jit(
        lambda params, moments, step, batch: update(params, moments, step, batch, 3e-4, 0, 1000),
        donate_argnums=(0, 1),
        compiler_options=VECTOR_WIDTH | ONEDNN,
    )
    compiled = jitted.lower(params, moments, 0, batch).compile()
    size, done = sum(x.size for x in jax.tree.leaves(params)), 0

    def step() -> float:
        nonlocal params, moments, done
        params, moments, loss = compiled(params, moments, done, batch)
        done += 1
        return float(loss)

    return Made(step, announced_bytes(compiled), size)


def announced_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


STEPS = {"ours": our_step, "plain": plain_step}


def trainer_laps(made: Made) -> list[Timed]:
    """Steps of a Trainer with the hooks of a run that makes no checkpoint."""
    from dseekjax.insight.metrics import MetricsHook
    from dseekjax.insight.terminal import TerminalHook
    from dseekjax.training.hooks import Hook

    class Laps(Hook):
        def __init__(self) -> None:
            self.watch = Stopwatch()
            self.laps: list[Timed] = []

        def on_record(self, record: Any) -> None:
            self.laps.append(self.watch.lap())

    laps = Laps()
    assert made.trainer is not None
    with tempfile.TemporaryDirectory() as folder:
        shown = MetricsHook(Path(folder, "metrics.jsonl"), [], print), TerminalHook(Console(quiet=True), 1)
        made.trainer([*shown, laps]).run()
    return laps.laps[WARM_UP:-LAST]


def step_laps(count: int, *steps: Callable[[], float]) -> list[list[Timed]]:
    """So many laps of each, in turns."""
    watch = Stopwatch()
    laps: list[list[Timed]] = [[] for _ in steps]
    for _ in range(count):
        for step, own in zip(steps, laps, strict=True):
            watch.lap()
            step()
            own.append(watch.lap())
    return laps


def peak(dtype: str) -> float:
    """FLOP/s of the best of five products."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((4096, 4096), dtype)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    watch = Stopwatch()
    laps = []
    for _ in range(5):
        product(matrix, matrix).block_until_ready()
        laps.append(watch.lap().seconds)
    return 2 * 4096**3 / min(laps)


def peak_resident(job: str, dtype: str, which: str) -> int:
    """Bytes that a process of its own comes to hold in three steps."""
    command = [sys.executable, __file__, "--job", job, "--dtype", dtype, "--hold", which]
    return int(run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def hold(job: str, dtype: str, which: str) -> int:
    """The other side of it."""
    made = STEPS[which](JOBS[job], dtype)
    for _ in range(3):
        made.step()
    # Not ru_maxrss, which a process has from whatever started it.
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def measure(name: str, dtype: str, rounds: int, progress: Progress) -> dict[str, Any]:
    job = JOBS[name]
    task = progress.add_task(f"{name} {dtype}", total=rounds + 2)
    ours, plain = (make(job, dtype) for make in STEPS.values())
    for _ in range(WARM_UP):
        ours.step()
        plain.step()
    progress.advance(task)
    flops = job.flops(ours.num_parameters)
    rows: list[dict[str, float]] = []
    best, laps_made = 0.0, []
    for _ in range(rounds):
        before = peak(dtype)
        laps = step_laps(STEPS_PER_ROUND, ours.step, plain.step)
        best = max(best, before, peak(dtype))
        # Around the Trainer, so that neither has the quieter half of a busy minute.
        alone = step_laps(STEPS_PER_ROUND // 2, ours.step)[0]
        trained = trainer_laps(ours)
        alone += step_laps(STEPS_PER_ROUND // 2, ours.step)[0]
        seconds = {
            key: median(lap.seconds for lap in counted(each))
            for key, each in (("ours", laps[0]), ("plain", laps[1]), ("alone", alone), ("trainer", trained))
        }
        laps_made += [*laps[0], *laps[1], *alone, *trained]
        rows.append(
            {
                "tokens per second": job.tokens / seconds["ours"],
                "ours, GFLOP/s": flops / seconds["ours"] / 1e9,
                "plain, GFLOP/s": flops / seconds["plain"] / 1e9,
                "ours to plain": median_ratio(laps[1], laps[0]),
                "Trainer to step": seconds["alone"] / seconds["trainer"],
            }
        )
        progress.advance(task)
    held = {which: peak_resident(name, dtype, which) for which in STEPS}
    progress.advance(task)
    found = {key: median(row[key] for row in rows) for key in rows[0]}
    return {
        "job": name,
        "dtype": dtype,
        **found,
        "peak, GFLOP/s": best / 1e9,
        "ours, of peak": found["ours, GFLOP/s"] * 1e9 / best,
        "plain, of peak": found["plain, GFLOP/s"] * 1e9 / best,
        "memory announced, GB": ours.announced_bytes / 1e9,
        "announced to plain": ours.announced_bytes / plain.announced_bytes,
        "memory resident, GB": held["ours"] / 1e9,
        "resident to plain": held["ours"] / held["plain"],
        "quiet steps, of all": sum(lap.quiet for lap in laps_made) / len(laps_made),
    }


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"train steps on CPU, {allocator_in_force()}, load {os.getloadavg()[0]:.2f}")
    table.add_column("")
    for row in results:
        table.add_column(f"{row['job']}\n{row['dtype']}", justify="right")
    for key in list(results[0])[2:]:
        table.add_row(key, *(f"{row[key]:.0f}" if row[key] >= 100 else f"{row[key]:.3f}" for row in results))
    console.print(table)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for, with what it leaves out filled in."""
    parser = argparse.ArgumentParser(
        "scripts/benchmark_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, action="append", help="may be repeated; default small")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be repeated; default float32")
    parser.add_argument("--rounds", type=int, help=f"of {STEPS_PER_ROUND} steps of each kind; default 1, with --all 3")
    parser.add_argument("--all", action="store_true", help="every job and every dtype")
    parser.add_argument("--json", action="store_true", help="print each result as a line of JSON too")
    parser.add_argument("--hold", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.all and (options.job or options.dtype):
        parser.error("--all takes every job and dtype; leave out --job and --dtype, or --all")
    options.job = list(JOBS) if options.all else options.job or ["small"]
    options.dtype = list(DTYPES) if options.all else options.dtype or ["float32"]
    if options.rounds is None:
        options.rounds = 3 if options.all else 1
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} times nothing; make it 1 or more")
    return options


def main() -> int:
    options = options_of()
    restart_with(best_allocator())
    # After the restart, which reads the environment that this sets.
    from dseekjax.platform import prepare_platform

    prepare_platform(virtual_devices=1)
    if options.hold:
        print(hold(options.job[0], options.dtype[0], options.hold))
        return 0
    console = Console()
    results: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for job in options.job:
            for dtype in options.dtype:
                results.append(measure(job, dtype, options.rounds, progress))
                if options.json:
                    # As soon as it is there: all of them together take long.
                    print(json.dumps(results[-1]), flush=True)
    show(results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
