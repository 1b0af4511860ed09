"""A model that was trained, opened from the folder of its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import tokenizers

from dseekjax.checkpoint.hugging_face.companions import KEPT
from dseekjax.checkpoint.parameters import read_parameters
from dseekjax.checkpoint.quiet import silence_orbax
from dseekjax.config import Config, load_config
from dseekjax.data.config import END_OF_DOCUMENT
from dseekjax.data.tokenizers import end_of_document_id, load_tokenizer, vocabulary_size
from dseekjax.errors import UserError, about
from dseekjax.imported import lost_origin, other_end_tokens, refuse_sliding_of_origin
from dseekjax.start import start_jax
from dseekjax.training.program import Program, build_program
from dseekjax.training.run_directory import RunDirectory


@dataclass(frozen=True)
class Trained:
    """Everything that is needed to use a model."""

    path: Path
    config: Config
    program: Program
    params: Any
    """Float32, as in `TrainState`, placed as they are trained."""
    step: int
    """Of the checkpoint that they are from."""
    tokenizer: tokenizers.Tokenizer
    end_token: int
    """The token after each document."""
    begin_tokens: tuple[int, ...] = ()
    """What goes before a text. Nothing for a model that was trained here, whose documents had nothing there; for an
    imported one what its tokenizer puts there by itself, as Llama's does."""
    other_end_tokens: tuple[int, ...] = ()
    """What ends a text beside the end token, as some imported models have it."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint tells of the data that they were trained on; nothing of an import."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """All that end a text."""
        return (self.end_token, *self.other_end_tokens)


def open_trained(
    path: str | Path, overrides: Sequence[str] = (), *, tell: Callable[[str], None] = lambda sentence: None
) -> Trained:
    """Opens the newest checkpoint of a run, which may be training, and leaves its folder as it is.

    Args:
        path: the run's folder.
        overrides: `dotted.key=value` on top of the run's config, as for another mesh.
        tell: called with sentences for the user.

    Raises:
        UserError: there is no such run, it has no sound checkpoint, it does not fit the devices, or sequences
            are longer than the window of a model that it began with.
    """
    directory = RunDirectory(path)
    config = run_config(directory, overrides)
    refuse_sliding_of_origin(directory, config)
    silence_orbax()
    start_jax(config)
    tokenizer = _tokenizer(directory, config)
    end_token = _end_token(directory, config, tokenizer)
    program = build_program(config, jax.devices())
    found = read_parameters(directory.checkpoints, program.state_shape)
    if directory.is_in_use:
        tell(f"{directory.path} is still training; this is its step {found.step}.")
    if lost := lost_origin(directory, config):
        tell(
            f"Note: {lost}, which this run began with, is not there any more; if it was an imported model, what else "
            "it ends texts with is not known here."
        )
    return Trained(
        directory.path,
        config,
        program,
        found.params,
        found.step,
        tokenizer,
        end_token,
        begin_tokens=before_a_text(tokenizer) if (directory.path / KEPT).is_dir() else (),
        other_end_tokens=other_end_tokens(directory, config, tokenizer, end_token),
        data=found.data,
    )


def run_config(directory: RunDirectory, overrides: Sequence[str] = ()) -> Config:
    """The config that a run was started with, and `overrides` on top.

    Raises:
        UserError: there is no run there, or its config or the overrides are wrong.
    """
    if not directory.config.is_file():
        raise UserError(f"{directory.path}: no run there (it has no config.yaml); give the run.dir of one")
    try:
        load_config(directory.config, option=None)
    except UserError as error:
        raise UserError(
            f"{directory.path}: its config.yaml does not load, is it of another version? ({error}); put back the one "
            "that it was trained with"
        ) from error
    return load_config(directory.config, overrides)


def _end_token(directory: RunDirectory, config: Config, tokenizer: tokenizers.Tokenizer) -> int:
    kept = directory.end_of_document
    text = kept.read_text(encoding="utf-8") if kept.is_file() else config.data.end_of_document or END_OF_DOCUMENT
    with about(str(directory.path)):
        return end_of_document_id(tokenizer, text)


def before_a_text(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that a tokenizer puts before every text."""
    plain, dressed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    place = next((i for i in range(len(dressed)) if dressed[i : i + len(plain)] == plain), 0)
    return tuple(dressed[:place])


def _tokenizer(directory: RunDirectory, config: Config) -> tokenizers.Tokenizer:
    if not directory.tokenizer.is_file():
        raise UserError(f"{directory.path}: its tokenizer.json is missing; put it back")
    tokenizer = load_tokenizer(directory.tokenizer)
    needed, there = vocabulary_size(tokenizer), config.model.vocabulary_size
    if needed > there:
        raise UserError(
            f"{directory.path}: its tokenizer has {needed} tokens and its model {there}; put back the tokenizer.json "
            "that it was trained with"
        )
    return tokenizer
