"""Trains language models with JAX, from one config, on any mesh of devices.

>>> import dseekjax
>>> config = dseekjax.load_config(overrides=["model.num_layers=2", "model.vocabulary_size=257"])
>>> config.model.num_layers
2

`build_program(config, devices)` gives everything jitted; a `Trainer` runs it. `open_trained(run)` opens what came of
it: a `Writer` continues texts with it, `log_likelihood` scores them. Names are loaded when they are first used, so that
importing this package is quick.
"""

import importlib
from typing import Any

_HOMES = {
    "Config": "dseekjax.config",
    "load_config": "dseekjax.config",
    "dump_config": "dseekjax.config",
    "recipe_path": "dseekjax.config",
    "UserError": "dseekjax.errors",
    "Batch": "dseekjax.models.batch",
    "Program": "dseekjax.training.program",
    "build_program": "dseekjax.training.program",
    "TrainState": "dseekjax.training.state",
    "Trainer": "dseekjax.training.trainer",
    "Hook": "dseekjax.training.hooks",
    "Context": "dseekjax.training.hooks",
    "CheckpointStore": "dseekjax.checkpoint.store",
    "Trained": "dseekjax.trained",
    "open_trained": "dseekjax.trained",
    "Writer": "dseekjax.generation.complete",
    "Sampling": "dseekjax.generation.sampling",
    "log_likelihood": "dseekjax.evaluation.likelihood",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dseekjax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
