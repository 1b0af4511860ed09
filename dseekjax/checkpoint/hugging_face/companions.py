"""The small files beside the tensors: what a run keeps of them, and what a folder is given."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dseekjax.checkpoint.hugging_face import config_json
from dseekjax.checkpoint.hugging_face.config_json import read_json
from dseekjax.checkpoint.hugging_face.families import Described, Family, describe, family_of
from dseekjax.files import write_whole
from dseekjax.models.config import DecoderConfig

KEPT = "hugging_face"
"""The folder inside a run that keeps what came with an imported model."""

OF_GENERATION = "generation_config.json"
OF_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
NOT_OF_THE_ARCHITECTURE = ("dropout", "initializer_scale", "scan_layers", "loss_chunk")


def keep_companions(source: Path, run: Path) -> None:
    """Copies the small files of an imported model into the folder of its run."""
    (run / KEPT).mkdir()
    for name in (config_json.NAME, OF_GENERATION, *OF_TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, run / KEPT / name)


def end_token_ids(folder: Path, described: Described) -> Iterator[int]:
    """Ids of tokens that end a text, as the files of an imported model tell, the most telling first."""
    generation = read_json(folder / OF_GENERATION) if (folder / OF_GENERATION).is_file() else {}
    for given in (described.parsed.eos_token_id, generation.get("eos_token_id")):
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int):
                yield token


def described_by(kept: Path | None, model: DecoderConfig) -> Described | None:
    """What an imported model's `config.json` tells, if it tells of just this model."""
    if kept is None or not (kept / config_json.NAME).is_file():
        return None
    described = describe(kept)
    theirs = DecoderConfig.model_validate(described.model_section)
    return described if _architecture(theirs) == _architecture(model) else None


def _architecture(model: DecoderConfig) -> dict[str, Any]:
    """What a model computes, without what it is trained with."""
    unused = "max_positions" if model.positions == "rotary" else "rotary_theta"
    values = model.model_dump(exclude={*NOT_OF_THE_ARCHITECTURE, unused})
    del values["attention"]["implementation"]
    return values


def export_family(model: DecoderConfig, described: Described | None) -> Family:
    """The family that a model was imported as, or else one that it can be written as; raises as `family_of` does."""
    return family_of(model) if described is None else described.family


def write_config(
    folder: Path,
    family: Family,
    model: DecoderConfig,
    described: Described | None,
    *,
    sequence_length: int,
    end_token: int,
    dtype: str,
) -> None:
    """Writes `config.json`: that which the model was imported with, where it still tells of it, or a new one."""
    if described is None:
        values = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.write_config(model, sequence_length),
            "bos_token_id": None,
            "eos_token_id": end_token,
            "torch_dtype": dtype,
        }
    else:
        values = dict(described.values)
        values["dtype" if "dtype" in values else "torch_dtype"] = dtype
        if model.positions == "rotary" and described.parsed.context_length < sequence_length:
            values["max_position_embeddings"] = sequence_length
        ends = described.parsed.eos_token_id
        if end_token not in (ends if isinstance(ends, list) else [ends]):
            values["eos_token_id"] = end_token
    write_whole(folder / config_json.NAME, json.dumps(values, indent=2) + "\n")


def write_companions(
    folder: Path,
    tokenizer: Path,
    kept: Path | None,
    *,
    same_tokenizer: bool,
    end_of_document: str,
    sequence_length: int,
) -> None:
    """Gives the tokenizer and what belongs to it.

    Args:
        folder: to write to.
        tokenizer: tokenizer.json of the run.
        kept: what came with the imported model.
        same_tokenizer: whether the run still has the tokenizer that came with it.
        end_of_document: the token after each document.
        sequence_length: that the model was trained on.
    """
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    names = (OF_GENERATION, *OF_TOKENIZER) if same_tokenizer else ()
    for name in names:
        if kept is not None and (kept / name).is_file():
            shutil.copyfile(kept / name, folder / name)
    if not (folder / OF_TOKENIZER[0]).is_file():
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_document,
            "model_max_length": sequence_length,
        }
        write_whole(folder / OF_TOKENIZER[0], json.dumps(values, indent=2, ensure_ascii=False) + "\n")
