"""Trains a recipe and an independent plain-JAX model from the same parameters on the same batches, side by side.

Prints how far the losses drift apart over the first 50 steps, and the held-out loss of both at the end.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "references"))
import plain_step
from plain_layout import plain_parameters

from dseekjax.config import load_config, recipe_path
from dseekjax.data.assembly import evaluation_batches, training_feed
from dseekjax.data.sources import open_data
from dseekjax.errors import UserError
from dseekjax.training.evaluation import build_evaluation
from dseekjax.training.feed import to_devices
from dseekjax.training.program import build_program


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="a GPT-2 type recipe in float32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    try:
        config = load_config(recipe_path(options.model), options.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    program = build_program(config, jax.devices()[:1])
    data = open_data(config.data, model_vocabulary_size=config.model.vocabulary_size)
    size = config.train.global_batch_size
    rows = np.arange(size)
    feed = training_feed(
        data,
        config.data,
        seed=config.run.seed,
        global_batch_size=size,
        rows=rows,
        num_batches=config.train.steps,
    )
    train = feed.start(feed.state(0))
    held_out = evaluation_batches(data.evaluation, config.data, global_batch_size=size, rows=rows)

    state = program.init()
    params = jax.tree.map(jnp.copy, plain_parameters(state.params))
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    schedule = (config.optimizer.learning_rate, config.optimizer.schedule.warmup_steps, config.train.steps)
    worst = 0.0
    for step in range(options.steps):
        fields = next(train)
        state, metrics = program.train_step(state, to_devices(fields, rows, program.batch_shape))
        params, moments, plain_loss = plain_step.train_step(params, moments, step, fields, *schedule)
        ours, plain = float(metrics["loss"]), float(plain_loss)
        if step < 50:
            worst = max(worst, abs(ours - plain))
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:4}  ours {ours:.6f}  plain {plain:.6f}  difference {ours - plain:+.1e}", flush=True)

    evaluate = build_evaluation(program, held_out, bytes_per_token=1.0, max_batches=None)
    ours = evaluate(state)["eval_loss"]
    mean_loss = jax.jit(plain_step.mean_loss)
    weights = [batch["loss_weights"].sum() for batch in held_out]
    plain = float(sum(float(mean_loss(params, b)) * w for b, w in zip(held_out, weights, strict=True)) / sum(weights))
    print(f"held-out loss after {options.steps} steps: ours {ours:.6f}, plain {plain:.6f}")
    print(f"largest difference in the first {min(options.steps, 50)} steps: {worst:.1e} (limit 1e-4)")
    if options.json:
        result = {
            "worst_difference": worst,
            "held_out": ours,
            "held_out_plain": plain,
            "loss_ratio": ours / plain,
        }
        print(json.dumps(result))
    return 0 if worst <= 1e-4 and math.isfinite(worst) else 1


if __name__ == "__main__":
    sys.exit(main())
