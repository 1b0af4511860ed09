"""The families that there are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dseekjax.checkpoint.hugging_face import gpt2, llama
from dseekjax.checkpoint.hugging_face.config_json import NAME, ConfigJson, parse, read_json
from dseekjax.checkpoint.hugging_face.mapping import Mapped
from dseekjax.errors import UserError, about
from dseekjax.models.config import DecoderConfig


@dataclass(frozen=True)
class Family:
    """What is known of the models of one `model_type`."""

    model_type: str
    architecture: str
    """The class of transformers that takes it."""
    config_json: type[ConfigJson]
    tensors: tuple[Mapped, ...]
    """Of every member; a model has those of the parameters that it has."""
    prefix: str
    """Of the names of all tensors but the output's; missing where the model was saved without its output."""
    buffers: str
    """A regular expression of names that some files hold and no model needs."""
    write_config: Callable[[DecoderConfig, int], dict[str, Any]]
    """Keys of config.json for a model and the length of its sequences."""
    problems: Callable[[DecoderConfig], list[str]]
    """Keys of a model that have no counterpart."""

    def tensors_of(self, parameters: Iterable[str]) -> tuple[Mapped, ...]:
        """Those of parameters of these names; each of them has one."""
        names = set(parameters)
        found = tuple(mapped for mapped in self.tensors if mapped.ours in names)
        if missing := names - {mapped.ours for mapped in found}:
            raise ValueError(f"{self.model_type} has no tensor for {sorted(missing)}")
        return found


def _llama_like(
    model_type: str,
    architecture: str,
    config_json: type[ConfigJson],
    write_config: Callable[[DecoderConfig, int], dict[str, Any]] = llama.llama_config_json,
) -> Family:
    return Family(
        model_type,
        architecture,
        config_json,
        llama.TENSORS,
        "model.",
        r".*rotary_emb\.inv_freq",
        write_config,
        llama.problems,
    )


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    gpt2.GPT2Json,
    gpt2.TENSORS,
    "transformer.",
    r"(.*\.)?attn\.(masked_)?bias",
    gpt2.config_json,
    gpt2.problems,
)
LLAMA = _llama_like("llama", "LlamaForCausalLM", llama.LlamaJson)
MISTRAL = _llama_like("mistral", "MistralForCausalLM", llama.MistralJson)
QWEN2 = _llama_like("qwen2", "Qwen2ForCausalLM", llama.Qwen2Json, llama.qwen2_config_json)
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2)}


@dataclass(frozen=True)
class Described:
    """A model as its `config.json` tells of it."""

    family: Family
    values: dict[str, Any]
    """All keys of the file."""
    parsed: ConfigJson
    model_section: dict[str, Any]
    """The keys of our `model` section that make the same model."""


def describe(folder: Path) -> Described:
    """Reads `config.json`.

    Raises:
        UserError: it is missing, or tells of a model of which there is none here.
    """
    path = folder / NAME
    values = read_json(path)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise UserError(
            f"{path}: model_type is {values.get('model_type')!r}, which is not known here; there are "
            f"{', '.join(FAMILIES)}"
        )
    parsed = parse(family.config_json, values, path)
    with about(str(path)):
        section = parsed.model_section()
        _refuse_impossible(section)
    return Described(family, values, parsed, section)


def _refuse_impossible(section: dict[str, Any]) -> None:
    """What no key of theirs can be blamed for alone."""
    try:
        DecoderConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("model", *first["loc"])))
        reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
        raise UserError(f"it tells of a model that cannot be, by {place}: {reason}") from error


def family_of(model: DecoderConfig) -> Family:
    """The family that a model of ours can be written as.

    Raises:
        UserError: something of it has no counterpart.
    """
    family = GPT2 if model.positions == "learned" else QWEN2 if model.biases == "qkv" else LLAMA
    if problems := family.problems(model):
        raise UserError(
            f"model.positions {model.positions} is that of {family.architecture}, in which there is no counterpart of "
            f"{' and '.join(problems)}; such a model stays here"
        )
    return family
