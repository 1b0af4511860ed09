"""A run of the tiny model, made once."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import plain_step
import pytest
from plain_layout import plain_parameters

from dseekjax.train import main as train
from dseekjax.trained import open_trained
from tests.tiny import door_arguments


class Run(NamedTuple):
    folder: Path
    path: str


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    options = (
        "model.vocabulary_size=258",
        "model.num_layers=2",
        "model.attention.num_kv_heads=4",
        "train.steps=60",
        "evaluation.every_steps=60",
    )
    assert train([*door_arguments(folder), *options, "checkpoint.every_steps=60", "data.packing=first_fit"]) == 0
    return Run(folder, str(folder / "run"))


@pytest.fixture(scope="session")
def trained(run):
    return open_trained(run.path)


@pytest.fixture(scope="session")
def plain_log_probabilities(trained):
    """From token ids, those of every token after the first, each predicted by a page of plain JAX from all before."""
    import jax

    params = jax.tree.map(np.asarray, plain_parameters(trained.params))
    length = trained.config.data.sequence_length

    @jax.jit
    def forward(tokens):
        positions = np.arange(length)[None]
        batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(positions)}
        return jax.nn.log_softmax(plain_step.forward(jax.tree.map(jax.numpy.asarray, params), batch))

    def log_probabilities(tokens):
        # Causality makes what follows not matter.
        row = np.zeros((1, length), np.int32)
        row[0, : len(tokens) - 1] = tokens[:-1]
        found = np.asarray(forward(row))[0, : len(tokens) - 1]
        return found[np.arange(len(tokens) - 1), tokens[1:]], found.argmax(-1) == tokens[1:]

    return log_probabilities
