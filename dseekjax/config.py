"""The root config: every room's own part, loaded from YAML and `key=value` overrides."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.config_errors import explain
from dseekjax.data.config import DataConfig
from dseekjax.distributed.config import DistributedConfig
from dseekjax.errors import UserError
from dseekjax.files import shipped_configs
from dseekjax.insight.config import InsightConfig
from dseekjax.memory.config import MemoryConfig
from dseekjax.models.config import ModelConfig
from dseekjax.optim.config import OptimizerConfig
from dseekjax.parallel.config import MeshConfig
from dseekjax.precision.config import PrecisionConfig
from dseekjax.section import Section
from dseekjax.training.config import EvaluationConfig, RunConfig, TrainConfig
from dseekjax.yaml_file import StrictLoader, read_yaml


class Config(Section):
    """Everything that a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    insight: InsightConfig = InsightConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        problems = []
        train, model, memory = self.train, self.model, self.memory
        if train.global_batch_size % train.num_microbatches:
            problems.append(
                f"train.num_microbatches {train.num_microbatches} does not divide train.global_batch_size "
                f"{train.global_batch_size}; choose a divisor"
            )
        if model.positions == "learned" and self.data.sequence_length > model.max_positions:
            problems.append(
                f"data.sequence_length {self.data.sequence_length} exceeds model.max_positions {model.max_positions}; "
                "shorten the one or raise the other"
            )
        if memory.recompute == "every_k" and model.num_layers % memory.recompute_every:
            problems.append(
                f"memory.recompute_every {memory.recompute_every} does not divide model.num_layers {model.num_layers}; "
                "choose a divisor"
            )
        if self.mesh.fsdp_prefetch == "carry" and memory.recompute != "full":
            problems.append(
                f"mesh.fsdp_prefetch carry keeps each layer's input and nothing else, but memory.recompute is "
                f"{memory.recompute}; set memory.recompute to full, or mesh.fsdp_prefetch to auto"
            )
        schedule = self.optimizer.schedule
        checkpoint = self.checkpoint
        if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every_steps:
            problems.append(
                f"checkpoint.keep_every {checkpoint.keep_every} is no multiple of checkpoint.every_steps "
                f"{checkpoint.every_steps}, when checkpoints are written; make it one"
            )
        scheduled = schedule.warmup_steps + (schedule.decay_steps if schedule.kind == "wsd" else 0)
        if scheduled > train.steps:
            problems.append(
                f"optimizer.schedule.warmup_steps {schedule.warmup_steps}"
                + (f" and decay_steps {schedule.decay_steps}" if schedule.kind == "wsd" else "")
                + f" do not fit into train.steps {train.steps}; shorten the schedule or raise train.steps"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, option: str | None = "--config"
) -> Config:
    """Reads a config.

    Args:
        path: YAML file; all keys have defaults, so it may leave out any, or be left out.
        overrides: `dotted.key=value` strings, the value in YAML; list items by number, `data.sources.0.path=x`.
        option: of the command line that named the file, for messages; None if none did.

    Raises:
        UserError: the file cannot be read, or keys or values are wrong; all problems are named at once.
    """
    values = {} if path is None else read_yaml(Path(path), option)
    for override in overrides:
        _override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(explain(error, values, Config))) from error


def dump_config(config: Config) -> str:
    """YAML of every key, which loads again to the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flat_config(config: Config) -> dict[str, Any]:
    """Every key with its dots, and its value as JSON has it; items of lists by number."""
    return _flat(config.model_dump(mode="json"))


def recipe_path(name: str) -> Path:
    """The config file of a recipe that is shipped, by the name of its file, or by what only its name begins with.

    Raises:
        UserError: there is no such recipe, or there are several.
    """
    recipes = {file.stem: file for file in shipped_configs().glob("*.yaml")}
    meant = [recipe for recipe in sorted(recipes) if name and recipe.startswith(name)]
    if name not in recipes and len(meant) != 1:
        several = f"{name} may be {' or '.join(meant)}; give one of them"
        raise UserError(several if meant else f"there is no recipe {name}; there are {', '.join(sorted(recipes))}")
    return recipes[name if name in recipes else meant[0]]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    else:
        return {prefix.rstrip("."): values}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        hint = f"for a config file give --config {override}" if override.endswith((".yaml", ".yml")) else "see --help"
        raise UserError(f"{override!r} is not of the form key=value, as in train.steps=100; {hint}")
    try:
        value = yaml.load(text, StrictLoader)
    except yaml.YAMLError:
        value = text
    *parents, last = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
    place: Any = values
    for name in parents:
        place = _child(place, name, key)
    if last.isdecimal() or isinstance(place, list):
        place[_item(place, last, key)] = value
    else:
        place[last] = value


def _child(place: Any, name: str, key: str) -> Any:
    if name.isdecimal() or isinstance(place, list):
        return place[_item(place, name, key)]
    if not isinstance(place.get(name), dict | list):
        place[name] = {}
    return place[name]


def _item(place: Any, name: str, key: str) -> int:
    length = len(place) if isinstance(place, list) else 0
    if not name.isdecimal() or int(name) >= length:
        raise UserError(
            f"{key}: the list in the config file ends before that; give the whole list, as in "
            "'data.sources=[{path: a.txt}]'"
        )
    return int(name)
