"""Runs made of Hugging Face checkpoints, and the other way round."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import tokenizers

from dseekjax.checkpoint.hugging_face.companions import (
    described_by,
    end_token_ids,
    export_family,
    keep_companions,
    write_companions,
    write_config,
)
from dseekjax.checkpoint.hugging_face.digests import check_digests, write_digests
from dseekjax.checkpoint.hugging_face.families import Described, describe
from dseekjax.checkpoint.hugging_face.reading import import_parameters
from dseekjax.checkpoint.hugging_face.tensor_files import TensorFiles
from dseekjax.checkpoint.hugging_face.writing import export_parameters
from dseekjax.checkpoint.parameters import write_parameters
from dseekjax.checkpoint.path import checkpoint_path
from dseekjax.checkpoint.quiet import silence_orbax
from dseekjax.config import Config, dump_config, load_config
from dseekjax.data.tokenizers import end_of_document_id, fingerprint, load_tokenizer, vocabulary_size
from dseekjax.errors import UserError, about
from dseekjax.files import WholeFolder, write_whole
from dseekjax.imported import kept_companions, refuse_sliding
from dseekjax.models.flops import parameter_count
from dseekjax.start import start_jax
from dseekjax.trained import open_trained, run_config
from dseekjax.training.processes import on_first_process
from dseekjax.training.program import build_program
from dseekjax.training.run_directory import RunDirectory

LONGEST_SEQUENCE = 4096
"""Of the config that an import writes: models are made for more than most machines train on."""

Tell = Callable[[str], None]
Watch = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are done."""


def import_run(
    source: Path,
    run: Path,
    overrides: Sequence[str] = (),
    *,
    tell: Tell = lambda sentence: None,
    watch: Watch = lambda work, done, total: None,
) -> Config:
    """Makes a run of a Hugging Face checkpoint: its parameters at step 0, its tokenizer and a config.

    Args:
        source: folder with `config.json`, safetensors files and `tokenizer.json`.
        run: folder to make; it appears when all is done.
        overrides: `dotted.key=value` on top of what the checkpoint tells.
        tell: called with sentences for the user.
        watch: called while bytes are read.

    Returns:
        The config of the run.

    Raises:
        UserError: something is missing, damaged or has no counterpart here, or `run` is there already.
    """
    run = run.expanduser().absolute()
    with about("--run"):
        checkpoint_path(RunDirectory(run).checkpoints)
        WholeFolder(run).refuse_existing()
    with about("--from-hf"):
        if not source.is_dir():
            raise UserError(f"there is no folder {source}; give one that holds a model")
        described = describe(source)
        tokenizer = _their_tokenizer(source, described)
        files = TensorFiles(source)
        end_of_document = _end_of_document(source, tokenizer)
    config = _imported_config(source, run, described, end_of_document, overrides)
    with about("data.end_of_document"):
        end_of_document_id(tokenizer, config.data.end_of_document or "")
    silence_orbax()
    start_jax(config)
    tell = _once(tell)
    for note in _notes(described, config):
        tell(note)
    program = build_program(config, jax.devices())
    with _whole_folder(run, "--run") as hidden:
        with about("--from-hf"):
            on_first_process(lambda: check_digests(source, lambda *sizes: watch("verifying", *sizes)))
            params = import_parameters(
                files, described.family, program.state_shape.params, watch=lambda *sizes: watch("reading", *sizes)
            )
        write_parameters(RunDirectory(hidden).checkpoints, params, config.checkpoint, config.model_dump(mode="json"))
        on_first_process(lambda: _write_small_files(source, RunDirectory(hidden), config))
    tell(
        f"{run} holds {described.family.architecture}, {parameter_count(config.model):,} parameters, with sequences of "
        f"{config.data.sequence_length} tokens that end in {config.data.end_of_document}."
    )
    return config


def _their_tokenizer(source: Path, described: Described) -> tokenizers.Tokenizer:
    path = source / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"there is no tokenizer.json in {source}; make it with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    tokenizer = load_tokenizer(path)
    needed, there = vocabulary_size(tokenizer), described.model_section["vocabulary_size"]
    if needed > there:
        raise UserError(
            f"{path} has {needed} tokens, but vocab_size of config.json is {there}; give the tokenizer and the "
            "config.json of one model"
        )
    return tokenizer


def _imported_config(
    source: Path,
    run: Path,
    described: Described,
    end_of_document: str | None,
    overrides: Sequence[str],
) -> Config:
    parsed = described.parsed
    longest = min(parsed.context_length, LONGEST_SEQUENCE, parsed.window or LONGEST_SEQUENCE)
    given: dict[str, Any] = {
        "run.dir": str(run),
        "model": {**described.model_section, "initializer_scale": parsed.initializer_range},
        "data.sequence_length": longest,
        "data.tokenizer": str(RunDirectory(run).tokenizer),
        "data.end_of_document": end_of_document,
    }
    written = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    config = load_config(overrides=[*written, *overrides])
    if config.run.dir != str(run):
        raise UserError(f"run.dir {config.run.dir}: --run {run} is where the run is made; leave run.dir out")
    refuse_sliding(described, source, config)
    if config.data.end_of_document is None:
        raise UserError(
            f"--from-hf: no eos_token_id in the files of {source} is a token of its tokenizer; give the token that "
            "ends documents, as in data.end_of_document='</s>'"
        )
    return config


def _notes(described: Described, config: Config) -> Iterator[str]:
    parsed, length = described.parsed, config.data.sequence_length
    if parsed.unknown_keys:
        yield f"Note: of config.json these keys are not known here, and left out: {', '.join(parsed.unknown_keys)}."
    if parsed.window is not None:
        yield (
            f"Note: attention slides a window of {parsed.window} tokens, of which there is none here: "
            f"data.sequence_length may be {parsed.window} at most, up to which it changes nothing."
        )
    if length > parsed.context_length:
        yield (
            f"Note: data.sequence_length {length} exceeds the {parsed.context_length} positions that the model was "
            "made for; of what is beyond them it knows nothing until it is trained on it."
        )


def _once(tell: Tell) -> Tell:
    """Of several processes only the first tells."""
    return tell if is_first_process() else lambda sentence: None


def is_first_process() -> bool:
    """Whether this is the only process, or the first of several; once devices are known."""
    return jax.process_index() == 0


def _end_of_document(source: Path, tokenizer: tokenizers.Tokenizer) -> str | None:
    ids = end_token_ids(source, tokenizer)
    return tokenizer.id_to_token(ids[0]) if ids else None


def _write_small_files(source: Path, directory: RunDirectory, config: Config) -> None:
    keep_companions(source, directory.path)
    shutil.copyfile(source / "tokenizer.json", directory.tokenizer)
    write_whole(directory.end_of_document, config.data.end_of_document or "")
    write_whole(directory.config, dump_config(config))


def export_run(
    run: Path,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    tell: Tell = lambda sentence: None,
    watch: Watch = lambda work, done, total: None,
) -> None:
    """Writes the newest parameters of a run as a Hugging Face checkpoint.

    Args:
        run: folder of a run, which may be training.
        target: folder to make; it appears when all is done.
        overrides: `dotted.key=value` on top of the run's config, as for another mesh.
        dtype: of the tensors: float32 or bfloat16.
        shard_bytes: largest size of a file.
        tell: called with sentences for the user.
        watch: called while bytes are written.

    Raises:
        UserError: there is no such run, its model has no counterpart, or `target` is there already.
    """
    target = target.expanduser().absolute()
    with about("--to-hf"):
        WholeFolder(target).refuse_existing()
    directory = RunDirectory(run)
    config = run_config(directory, overrides)
    kept = kept_companions(directory, config)
    length = config.data.sequence_length
    described = described_by(kept, config.model)
    with about("--to-hf"):
        family = export_family(config.model, described)
    trained = open_trained(run, overrides, tell=tell)
    with _whole_folder(target, "--to-hf") as hidden:
        with about("--to-hf"):
            export_parameters(
                trained.params,
                family,
                hidden,
                dtype=dtype,
                shard_bytes=shard_bytes,
                watch=lambda *sizes: watch("writing", *sizes),
            )

        def write_small_files() -> None:
            write_config(
                hidden,
                family,
                config.model,
                described,
                sequence_length=length,
                end_tokens=trained.end_tokens,
                dtype=dtype,
            )
            write_companions(
                hidden,
                directory.tokenizer,
                kept,
                same_tokenizer=kept is not None and _same_tokenizer(directory, RunDirectory(kept.parent)),
                end_tokens={trained.tokenizer.id_to_token(token) or "": token for token in trained.end_tokens},
                sequence_length=length,
            )
            write_digests(hidden)

        on_first_process(write_small_files)
    _once(tell)(f"{target} holds {directory.path} at step {trained.step} as {family.architecture} in {dtype}.")


def _same_tokenizer(one: RunDirectory, other: RunDirectory) -> bool:
    if not other.tokenizer.is_file():
        return False
    return fingerprint(load_tokenizer(one.tokenizer)) == fingerprint(load_tokenizer(other.tokenizer))


@contextmanager
def _whole_folder(place: Path, option: str) -> Iterator[Path]:
    """A folder that all processes fill and the first one makes, names, and removes if anything fails."""
    folder = WholeFolder(place)

    def with_option(action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with about(option):
                action()

        return run

    on_first_process(with_option(folder.begin))
    try:
        yield folder.hidden
        on_first_process(with_option(folder.finish))
    finally:
        folder.discard()
