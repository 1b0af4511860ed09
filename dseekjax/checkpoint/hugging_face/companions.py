"""The small files beside the tensors: what a run keeps of them, and what a folder is given."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dseekjax.checkpoint.hugging_face import config_json
from dseekjax.checkpoint.hugging_face.config_json import read_json
from dseekjax.checkpoint.hugging_face.families import Described, Family, describe, family_of
from dseekjax.data.tokenizers import TOKENIZER_CONFIG, special_token, vocabulary_size
from dseekjax.files import write_whole
from dseekjax.models.config import DecoderConfig

KEPT = "hugging_face"
"""The folder inside a run that keeps what came with an imported model."""

OF_GENERATION = "generation_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
OF_TOKENIZER = (TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", TEMPLATE, OLD_TEMPLATE)
NOT_OF_THE_ARCHITECTURE = ("dropout", "initializer_scale", "scan_layers", "loss_chunk")


def keep_companions(source: Path, run: Path) -> None:
    """Copies the small files of an imported model into the folder of its run."""
    (run / KEPT).mkdir()
    for name in (config_json.NAME, OF_GENERATION, *OF_TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, run / KEPT / name)


def end_token_ids(folder: Path, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Ids of tokens that end a text, as the files of an imported model tell, the most telling first.

    Args:
        folder: with these files.
        tokenizer: that came with them, of which they have to be tokens: some files have -1 for none.

    Raises:
        UserError: a file is damaged.
    """
    found: list[int] = []
    for name in (config_json.NAME, OF_GENERATION):
        given = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        found += [token for token in (given if isinstance(given, list) else [given]) if type(token) is int]
    size = vocabulary_size(tokenizer)
    return [token for token in dict.fromkeys(found) if 0 <= token < size and tokenizer.id_to_token(token) is not None]


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
    end_tokens: Sequence[int],
    dtype: str,
) -> None:
    """Writes `config.json`: that which the model was imported with, where it still tells of it, or a new one.

    Args:
        folder: to write to.
        family: that the model is written as.
        model: the model.
        described: what it was imported with.
        sequence_length: that it was trained on.
        end_tokens: each of which ends a text.
        dtype: of the tensors.
    """
    if described is None:
        values = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.write_config(model, sequence_length),
            "bos_token_id": None,
            "torch_dtype": dtype,
        }
    else:
        values = dict(described.values)
        values["dtype" if "dtype" in values else "torch_dtype"] = dtype
        if model.positions == "rotary" and described.parsed.context_length < sequence_length:
            values = described.parsed.with_context_length(values, sequence_length)
    _write(folder / config_json.NAME, {**values, "eos_token_id": _one_or_all(end_tokens)})


def write_companions(
    folder: Path,
    tokenizer: Path,
    kept: Path | None,
    *,
    same_tokenizer: bool,
    end_tokens: Mapping[str, int],
    sequence_length: int,
) -> None:
    """Gives the tokenizer and what belongs to it; tokens that end texts are the same in all files.

    Args:
        folder: to write to.
        tokenizer: tokenizer.json of the run.
        kept: what came with the imported model.
        same_tokenizer: whether the run still has the tokenizer that came with it.
        end_tokens: that end a text and their ids, the one after each document first.
        sequence_length: that the model was trained on.
    """
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    names = (OF_GENERATION, *OF_TOKENIZER) if same_tokenizer and kept is not None else ()
    for name in names:
        if kept is not None and (kept / name).is_file():
            shutil.copyfile(kept / name, folder / name)
    end_of_document = next(iter(end_tokens))
    if not (folder / TOKENIZER_CONFIG).is_file():
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence_length}
        _write(folder / TOKENIZER_CONFIG, {**values, "eos_token": end_of_document})
    before = special_token(read_json(folder / TOKENIZER_CONFIG).get("eos_token"))
    word = before if before in end_tokens else end_of_document
    if before not in ("", word):
        _keep_word_of_template(folder, before)
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if (folder / name).is_file() and special_token(read_json(folder / name).get("eos_token")) != word:
            _set(folder / name, "eos_token", word)
    if (folder / OF_GENERATION).is_file():
        _set(folder / OF_GENERATION, "eos_token_id", _one_or_all(list(end_tokens.values())))


def _keep_word_of_template(folder: Path, eos_token: str) -> None:
    """Chat templates that write `eos_token` go on writing that which the model has learned with them."""
    setting = f"{{% set eos_token = {json.dumps(eos_token, ensure_ascii=False)} +%}}"

    def kept(template: Any) -> Any:
        """Of a template, or of several with their names."""
        if isinstance(template, list):
            return [{**one, "template": kept(one["template"])} for one in template]
        return setting + template if isinstance(template, str) and "eos_token" in template else template

    if (folder / TEMPLATE).is_file():
        write_whole(folder / TEMPLATE, kept((folder / TEMPLATE).read_text("utf-8")))
    for name in (TOKENIZER_CONFIG, OLD_TEMPLATE):
        if (folder / name).is_file() and "chat_template" in (values := read_json(folder / name)):
            _set(folder / name, "chat_template", kept(values["chat_template"]))


def _one_or_all(tokens: Sequence[int]) -> int | list[int]:
    return tokens[0] if len(tokens) == 1 else list(tokens)


def _set(path: Path, key: str, value: Any) -> None:
    """Sets a key of a file, which stays as it is where that has the value already."""
    values = read_json(path)
    if values.get(key) != value:
        _write(path, {**values, key: value})


def _write(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
