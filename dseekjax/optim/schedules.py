"""Learning rate as a function of the step."""

from collections.abc import Callable

import jax
import optax

from dseekjax.optim.config import OptimizerConfig

Schedule = Callable[[jax.Array], jax.Array]


def build_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The learning rate of step 0, 1, …; the last of `total_steps` steps is one step short of the final value."""
    peak, schedule = config.learning_rate, config.schedule
    warmup = schedule.warmup_steps
    remaining = max(total_steps - warmup, 1)
    parts = [optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))]
    boundaries = [warmup]
    if schedule.kind == "constant":
        parts.append(optax.constant_schedule(peak))
    elif schedule.kind == "cosine":
        parts.append(optax.cosine_decay_schedule(peak, remaining, alpha=schedule.final_fraction))
    elif schedule.kind == "linear":
        parts.append(optax.linear_schedule(peak, peak * schedule.final_fraction, remaining))
    else:
        parts.append(optax.constant_schedule(peak))
        parts.append(optax.linear_schedule(peak, peak * schedule.final_fraction, max(schedule.decay_steps, 1)))
        boundaries.append(total_steps - schedule.decay_steps)
    return optax.join_schedules(parts, boundaries)
