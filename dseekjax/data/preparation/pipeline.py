"""Prepares a corpus: units to workers, their tokens into shards, and at the end a manifest."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from dseekjax.data.manifest import (
    FORMAT,
    INPUTS,
    MANIFEST,
    MASKED_FORMAT,
    TOKENIZER,
    File,
    LeftOut,
    Manifest,
    hash_file,
    read_manifest,
    write_manifest,
)
from dseekjax.data.preparation.claim import claimed
from dseekjax.data.preparation.pool import encoded
from dseekjax.data.preparation.shards import (
    COLUMNS,
    MASKED_COLUMNS,
    SHARD_BYTES,
    Journal,
    Shards,
    read_journal,
    write_journal,
)
from dseekjax.data.preparation.units import UNIT_BYTES, plan_units
from dseekjax.data.preparation.worker import Encoder, UnitFiles
from dseekjax.data.reading.inputs import Format, Input, look_at
from dseekjax.data.reading.rows import ChatRow
from dseekjax.data.tokenizers import end_of_document_id, fingerprint, vocabulary_size
from dseekjax.errors import UserError
from dseekjax.files import write_whole


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come."""

    input_bytes: int
    total_input_bytes: int
    num_tokens: int


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Recipe:
    """What a corpus is made from: equal recipes make equal corpora."""

    inputs: tuple[Input, ...]
    """In the order that their documents are to have."""
    format: Format
    end_of_document: str
    """The token put after each document."""
    tokenizer_key: str
    """Tells what `make_tokenizer` makes from what another might."""
    make_tokenizer: Callable[[], tokenizers.Tokenizer]

    @property
    def fingerprint(self) -> str:
        parts: list[Any] = [FORMAT, UNIT_BYTES, SHARD_BYTES, self.tokenizer_key, self.end_of_document]
        parts += [self.format.text_field, self.format.document_separator]
        if self.format.example is not None:
            parts += [MASKED_FORMAT, type(self.format.example).__name__, asdict(self.format.example)]
        parts += [value for file in self.inputs for value in asdict(file).values()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prepare_corpus(
    recipe: Recipe, output: Path, *, workers: int = 1, watch: Watch = lambda progress: None, wait: bool = False
) -> Manifest:
    """Tokenises files into a corpus, going on with what an earlier call left in `OUTPUT.unfinished`.

    `output` appears when all of it is done, and depends on the recipe alone. With more than one worker, a script that
    calls this needs `if __name__ == "__main__":`, as with any of Python's process pools.

    Args:
        recipe: what to make.
        output: folder to make it in.
        workers: processes that read and tokenise; 1 does it in this one.
        watch: called as work goes on.
        wait: whether to wait for another process that prepares the same, rather than to refuse.

    Raises:
        UserError: an input is damaged, nothing can be written, or `output` holds something else.
    """
    made_from = recipe.fingerprint
    with _explained(output), claimed(output, wait) as unfinished:
        if unfinished is None:
            return _refuse_other(output, recipe, made_from)
        if not (unfinished / MANIFEST).is_file():
            write_manifest(unfinished, _make(recipe, made_from, unfinished, workers, watch))
        manifest = _refuse_other(unfinished, recipe, made_from)
        for path in unfinished.iterdir():
            # The journal, and what a kill left half done.
            if path.name not in (MANIFEST, *manifest.files):
                path.unlink()
        unfinished.rename(output)
        return manifest


def _make(recipe: Recipe, made_from: str, folder: Path, workers: int, watch: Watch) -> Manifest:
    journal, tokenizer = _begin(folder, recipe, made_from)
    end_token = end_of_document_id(tokenizer, recipe.end_of_document)
    dtype = "uint16" if vocabulary_size(tokenizer) <= 1 << 16 else "uint32"
    units = plan_units(recipe.inputs, recipe.format)
    sizes = [sum(span.num_bytes for span in unit) for unit in units]
    done = sum(sizes[: journal.num_units])
    is_masked = recipe.format.example is not None
    with Shards(folder, dtype, journal, MASKED_COLUMNS if is_masked else COLUMNS) as shards:
        watch(Progress(done, sum(sizes), journal.num_tokens))
        encoder = Encoder(tokenizer, end_token, dtype, recipe.format)
        for number, report in encoded(units, journal.num_units, encoder, folder, workers):
            shards.append(report, UnitFiles.of(folder, number))
            done += sizes[number]
            watch(Progress(done, sum(sizes), shards.journal.num_tokens))
        journal = shards.journal
        _refuse_changed(recipe.inputs, folder)
        _refuse_empty(journal, recipe.inputs)
        files = shards.finish()
    lines = "".join(json.dumps(asdict(file), ensure_ascii=False) + "\n" for file in recipe.inputs)
    write_whole(folder / INPUTS, lines)
    files |= {name: File.of(folder / name, hash_file(folder / name)) for name in (TOKENIZER, INPUTS)}
    return Manifest(
        format=MASKED_FORMAT if is_masked else FORMAT,
        dtype=dtype,
        num_tokens=journal.num_tokens,
        num_documents=journal.num_documents,
        num_bytes=journal.num_bytes,
        tokens_per_shard=shards.tokens_per_shard,
        end_of_document=recipe.end_of_document,
        end_token=end_token,
        tokenizer=fingerprint(tokenizer),
        made_from=made_from,
        num_inputs=len(recipe.inputs),
        input_bytes=sum(file.size for file in recipe.inputs),
        left_out=journal.left_out,
        files=files,
    )


def _begin(folder: Path, recipe: Recipe, made_from: str) -> tuple[Journal, tokenizers.Tokenizer]:
    path, journal = folder / TOKENIZER, read_journal(folder)
    if journal is None:
        # The tokenizer comes first, and always from the file: a second start must have the same as the first.
        tokenizer = recipe.make_tokenizer()
        if isinstance(recipe.format.example, ChatRow):
            recipe.format.example.template.refuse_unknown_tokens(tokenizer)
        write_whole(path, tokenizer.to_str())
        journal = Journal(made_from=made_from, tokenizer=hash_file(path))
        write_journal(folder, journal)
    if journal.made_from != made_from:
        raise UserError(
            f"{folder} was begun with other files, another tokenizer or other options, or a file has changed since; "
            "go on with those, or remove it to start over"
        )
    if not path.is_file() or hash_file(path) != journal.tokenizer:
        raise UserError(f"{path} is damaged; remove {folder} to start over")
    _refuse_left_out(recipe, journal.left_out, folder)
    return journal, tokenizers.Tokenizer.from_file(str(path))


def _refuse_other(output: Path, recipe: Recipe, made_from: str) -> Manifest:
    if not (output / MANIFEST).is_file():
        raise UserError(f"{output} is there and is no corpus; choose another folder, or remove it")
    manifest = read_manifest(output)
    if manifest.made_from != made_from:
        raise UserError(
            f"{output} was prepared from other files, or with another tokenizer or other options, or by another "
            "version, and a corpus holds one kind only; choose another folder, and give both as data.sources"
        )
    _refuse_left_out(recipe, manifest.left_out, output)
    return manifest


def _refuse_left_out(recipe: Recipe, left_out: LeftOut, folder: Path) -> None:
    if recipe.format.strict and left_out.num_malformed:
        raise UserError(
            f"{folder} was prepared without strictness, and {left_out.num_malformed:,} lines left out: "
            f"{left_out.examples[0]}; mend that, and choose another folder"
        )


def _refuse_changed(inputs: Sequence[Input], folder: Path) -> None:
    for file in inputs:
        if look_at(Path(file.path)) != file:
            raise UserError(f"{file.path} changed while it was read; remove {folder} and prepare it again")


def _refuse_empty(journal: Journal, inputs: Sequence[Input]) -> None:
    if journal.num_documents:
        return
    named = inputs[0].path + (f", with {len(inputs) - 1:,} files more," if len(inputs) > 1 else "")
    if journal.left_out.examples:
        raise UserError(
            f"{named} holds no document: {journal.left_out.examples[0]}; mend that, or name the right field"
        )
    raise UserError(f"{named} holds no text; give a file with at least one line")


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenises was killed, for want of memory perhaps; run the same command with fewer workers, "
            "and it goes on where it stopped"
        ) from error
    except OSError as error:
        place = str(error.filename or output)
        if not place.startswith(str(output)):
            raise UserError(f"cannot read {place} ({error.strerror}); mend that and prepare again") from error
        raise UserError(
            f"cannot write {output} ({error.strerror or error}); make room there or choose another folder, and run the "
            "same command again: it goes on where it stopped"
        ) from error
