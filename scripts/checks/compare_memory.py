"""Compares the memory that a compiled train step says it needs with what the process comes to hold while it runs.

The prediction is what `compiled.memory_analysis()` gives: arguments, outputs and temporaries of each device, less the
outputs that take the place of arguments, times the devices of this process. The measurement is how far the peak of the
resident set rises above where it stood before there was any state.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np
import psutil

from dseekjax.config import load_config, recipe_path
from dseekjax.errors import UserError
from dseekjax.models.batch import Batch
from dseekjax.platform import prepare_platform
from dseekjax.training.program import build_program

OVERRIDES = (
    "model.vocabulary_size=16384",
    "model.num_layers=8",
    "model.embed_dim=640",
    "model.attention.num_heads=10",
    "model.feed_forward.hidden_dim=2560",
    "model.max_positions=512",
    "data.sequence_length=512",
    "train.global_batch_size=8",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of a GPT of 60 million parameters")
    options = parser.parse_args()
    try:
        config = load_config(recipe_path("quickstart"), [*OVERRIDES, *options.overrides])
        prepare_platform(config.run.virtual_devices)
        program = build_program(config, jax.devices())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code

    compiled = program.train_step.lower(program.state_shape, program.batch_shape).compile()
    analysis = compiled.memory_analysis()
    per_device = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    batch = random_batch(config, program)
    before = psutil.Process().memory_info().rss
    # From zeros, as initialising has temporaries of its own.
    state = jax.tree.map(zeros, program.state_shape)
    forget_peak()
    for _ in range(options.steps):
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
    result = {
        "devices": jax.device_count(),
        "predicted_bytes": per_device * jax.device_count(),
        "measured_bytes": peak() - before,
    }
    result["measured_over_predicted"] = result["measured_bytes"] / result["predicted_bytes"]
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['devices']} device(s): predicted {result['predicted_bytes'] / 2**20:.0f} MiB, "
            f"measured {result['measured_bytes'] / 2**20:.0f} MiB, ratio {result['measured_over_predicted']:.3f}"
        )
    return 0


def random_batch(config, program):
    draw = np.random.default_rng(0)
    shape = program.batch_shape.tokens.shape
    tokens = draw.integers(0, config.model.vocabulary_size, shape)
    places = np.broadcast_to(np.arange(shape[1]), shape)
    fields = Batch(tokens, tokens, np.ones(shape), np.ones(shape), places)
    return jax.tree.map(
        lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), fields, program.batch_shape
    )


def zeros(shape):
    def part(index):
        # Written to, so that the pages are there.
        local = np.empty(
            [len(range(*place.indices(size))) for place, size in zip(index, shape.shape, strict=True)], shape.dtype
        )
        local.fill(0)
        return local

    return jax.make_array_from_callback(shape.shape, shape.sharding, part)


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def peak():
    """Highest resident set since `forget_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
