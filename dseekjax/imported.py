"""What runs keep of an imported model that they are, or began with."""

from collections.abc import Iterator
from pathlib import Path

import tokenizers

from dseekjax.checkpoint.hugging_face.companions import KEPT, end_token_ids
from dseekjax.checkpoint.hugging_face.config_json import NAME
from dseekjax.checkpoint.hugging_face.families import Described, describe
from dseekjax.config import Config
from dseekjax.data.tokenizers import load_tokenizer
from dseekjax.errors import UserError
from dseekjax.training.run_directory import RunDirectory
from dseekjax.yaml_file import read_yaml


def lost_origin(directory: RunDirectory, config: Config) -> Path | None:
    """The folder of a run that this one began with, be it over several runs, and that is not there any more."""
    for run in _origins(directory, config):
        if not run.path.is_dir():
            return run.path
        if (run.path / KEPT).is_dir():
            return None
    return None


def kept_companions(directory: RunDirectory, config: Config) -> Path | None:
    """The folder with what came with the imported model that a run is, or began with, be it over several runs.

    Args:
        directory: of the run.
        config: of the run.

    Raises:
        UserError: the config of a run that it began with cannot be read.
    """
    return next((run.path / KEPT for run in _origins(directory, config) if (run.path / KEPT).is_dir()), None)


def _origins(directory: RunDirectory, config: Config) -> Iterator[RunDirectory]:
    """A run, that which it began with, that which that one began with, and so on."""
    began_with: object = config.train.initialize_from
    seen: set[Path] = set()
    while directory.path not in seen:
        seen.add(directory.path)
        yield directory
        if not isinstance(began_with, str):
            return
        directory = RunDirectory(began_with)
        began_with = _began_with(directory)


def other_end_tokens(
    directory: RunDirectory, config: Config, tokenizer: tokenizers.Tokenizer, end_token: int
) -> tuple[int, ...]:
    """Tokens that end a text beside that after each document: the imported model's, if that is one of them.

    Args:
        directory: of the run.
        config: of the run.
        tokenizer: of the run.
        end_token: the token after each document.

    Raises:
        UserError: what was kept of the import cannot be read.
    """
    kept = kept_companions(directory, config)
    origin = None if kept is None else RunDirectory(kept.parent).tokenizer
    if kept is None or origin is None or not origin.is_file():
        return ()
    theirs = load_tokenizer(origin)
    ids = [token for token in end_token_ids(kept, theirs) if tokenizer.id_to_token(token) == theirs.id_to_token(token)]
    return tuple(token for token in ids if token != end_token) if end_token in ids else ()


def _began_with(directory: RunDirectory) -> object:
    """Of the keys of its config this one alone is read: those of another version need not load."""
    if not directory.config.is_file():
        return None
    train = read_yaml(directory.config).get("train")
    return train.get("initialize_from") if isinstance(train, dict) else None


def refuse_sliding(described: Described, folder: Path, config: Config) -> None:
    """Raises UserError if sequences are longer than the window that an imported model slides: there is none here.

    Args:
        described: the imported model.
        folder: that holds its `config.json`.
        config: to use it with.
    """
    window, length = described.parsed.window, config.data.sequence_length
    if window is not None and length > window:
        raise UserError(
            f"data.sequence_length {length} exceeds the sliding_window of {window} in {folder / NAME}; make it "
            f"{window} at most"
        )


def refuse_sliding_of_origin(directory: RunDirectory, config: Config) -> None:
    """The same for a run that is an imported model, or began with one.

    Args:
        directory: of the run.
        config: to use it with.

    Raises:
        UserError: sequences are longer than its window, or what was kept of it cannot be read.
    """
    kept = kept_companions(directory, config)
    if kept is not None and (kept / NAME).is_file():
        refuse_sliding(describe(kept), kept, config)
