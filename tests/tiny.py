"""A config that compiles in seconds, and batches for it."""

from pathlib import Path

import numpy as np

from dseekjax.config import Config, load_config
from dseekjax.insight.metrics import read_records
from dseekjax.models.batch import Batch

OVERRIDES = (
    "model.vocabulary_size=96",
    "model.num_layers=4",
    "model.embed_dim=32",
    "model.attention.num_heads=4",
    "model.attention.num_kv_heads=2",
    "model.attention.head_dim=8",
    "model.feed_forward.hidden_dim=64",
    "model.max_positions=24",
    "model.loss_chunk=100",
    "model.scan_layers=true",
    "data.sequence_length=24",
    "train.global_batch_size=16",
    "train.steps=20",
    "optimizer.learning_rate=0.01",
)

LLAMA = (
    "model.positions=rotary",
    "model.norm=rms_norm",
    "model.biases=none",
    "model.feed_forward.activation=swiglu",
    "model.tied_embeddings=false",
)


def tiny_config(*overrides: str) -> Config:
    return load_config(overrides=[*OVERRIDES, *overrides])


def random_fields(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of several random documents to a row, as the data room makes them."""
    rng = np.random.default_rng(seed)
    shape = (config.train.global_batch_size, config.data.sequence_length)
    tokens = rng.integers(0, config.model.vocabulary_size, (shape[0], shape[1] + 1)).astype(np.int32)
    starts = rng.random((shape[0], shape[1] + 1)) < 0.15
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1).astype(np.int32)
    places = np.arange(shape[1] + 1)
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_weights": (segments[:, 1:] == segments[:, :-1]).astype(np.float32),
        "segment_ids": segments[:, :-1],
        "positions": positions[:, :-1].astype(np.int32),
    }


def random_batch(config: Config, seed: int = 0) -> Batch:
    return Batch(**random_fields(config, seed))


def door_arguments(folder: Path) -> list[str]:
    """For the train door: the tiny model on a small text, everything inside `folder`. Later overrides win."""
    text, config = folder / "text.txt", folder / "tiny.yaml"
    text.write_text("".join(f"{i} bottles of beer on the wall.\n\n" for i in range(400)))
    config.write_text("{}")
    return [
        *("--config", str(config)),
        *OVERRIDES,
        "model.vocabulary_size=257",
        f"run.dir={folder / 'run'}",
        f"data.cache_dir={folder / 'cache'}",
        "run.compilation_cache_dir=null",
        f"data.sources=[{{path: {text}, document_separator: '(?<=\\n\\n)'}}]",
    ]


def compared_records(run: Path) -> list[tuple[float | None, ...]]:
    """What two runs of the same steps must agree on, a tuple per step."""
    return [
        tuple(record[name] for name in ("step", "loss", "grad_norm", "learning_rate"))
        for record in read_records(run / "metrics.jsonl")
    ]
