"""`config.json` of a checkpoint: what families have in common."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dseekjax.errors import UserError

NAME = "config.json"

HARMLESS = frozenset(
    {
        *("_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
        *("bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("use_cache", "attention_dropout", "pretraining_tp", "gradient_checkpointing", "max_length", "n_ctx"),
        *("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "task_specific_params"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        *("_attn_implementation", "_attn_implementation_internal", "id2label", "label2id"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type"),
        *("finetuning_task", "is_encoder_decoder", "tokenizer_class", "name_or_path", "use_mrope"),
    }
)
"""Keys that change nothing of what a trained model computes."""


class ConfigJson(BaseModel):
    """What all families know. Fields have the defaults of transformers, which does not write down all of them."""

    model_config = ConfigDict(extra="allow", strict=True)

    eos_token_id: int | list[int] | None = None
    initializer_range: float = Field(0.02, gt=0)
    quantization_config: Literal[None] = None

    @property
    def unknown_keys(self) -> list[str]:
        """Keys that may mean something which is not known here."""
        return sorted(set(self.model_extra or {}) - HARMLESS)

    def model_section(self) -> dict[str, Any]:
        """The keys of our `model` section that make the same model.

        Raises:
            UserError: there is no such model.
        """
        raise NotImplementedError

    @property
    def context_length(self) -> int:
        """Longest sequence that the model was made for."""
        raise NotImplementedError

    def with_context_length(self, values: dict[str, Any], length: int) -> dict[str, Any]:
        """The keys of the file for longer sequences, which change nothing else; raises as `context_length` does."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """Tokens that a token of some layer sees, itself included, if not all before it."""
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError if there is no such file or it holds no JSON object."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no {path.name} in {path.parent}; give a folder that holds a whole model") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not keys and values; fetch it again")
    return values


def parse(kind: type[ConfigJson], values: dict[str, Any], path: Path) -> ConfigJson:
    """Raises UserError if a value makes a model of which there is none here."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        # What comes after it is a name of pydantic's, of one of the types that it may have.
        key = str(first["loc"][0])
        if first["type"] == "missing":
            raise UserError(f"{path}: {key} is missing; put it back") from error
        expected = first.get("ctx", {}).get("expected")
        wants = f"only {expected} is supported" if expected else first["msg"].lower()
        value = json.dumps(first["input"], default=repr)
        raise UserError(f"{path}: {key} is {value}, of which there is no counterpart here: {wants}") from error
