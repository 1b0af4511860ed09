"""Prepares text for training: `python -m dseekjax.prepare --input 'texts/**/*.txt' --output corpora/texts`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.data.config import (
    END_OF_DOCUMENT,
    ChatConfig,
    CompletionConfig,
    DataConfig,
    check_separator,
    check_tokenizer,
)
from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError, about

if TYPE_CHECKING:
    import tokenizers
    from rich.console import Console

    from dseekjax.data.manifest import Manifest
    from dseekjax.data.preparation.pipeline import Recipe

DESCRIPTION = """\
Tokenises files into a corpus: a folder that training reads with data.sources=[{path: DIR}]. Stopped, by whatever, the
same command goes on from there.

  inspect DIR    shows what is in a corpus
  verify DIR     reads every byte of it and compares checksums"""

EPILOG = """\
Text files (.txt, .md or any other name) are one document each, unless there is a --document-separator; .jsonl and
.parquet hold one to a line. Text and .jsonl may be compressed as .gz or .zst. What is made depends on the files and
these options alone, not on the number of workers."""


FORMAT_OPTIONS = (
    ("--prompt-field", "completion", "the field of the prompt; default prompt"),
    ("--completion-field", "completion", "the field of what follows it; default completion"),
    ("--messages-field", "chat", "the field of the list of objects with role and content; default messages"),
    ("--chat-template", "chat", "chatml, plain, or the path of a Jinja template or of a tokenizer_config.json"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 a mistake of the user, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"inspect": _inspect, "verify": _verify}

    def run() -> int:
        if given and given[0] in commands:
            commands[given[0]](given[1:])
        else:
            _prepare(given)
        return 0

    # Workers end with this process, and what is done is on disk.
    return exit_status(run, lambda: "interrupted; the same command goes on from here")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("prepare"),
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", metavar="GLOB", nargs="+", action="extend", default=[], help="files, as in 'texts/**/*.jsonl.zst'")
    add("--output", metavar="DIR", required=True, help="folder to make; it appears when all is done")
    add("--tokenizer", metavar="T", default="bytes", help="bytes, train:VOCAB to learn one from the files, or the path "
        "of a tokenizer.json; default bytes")  # fmt: skip
    add("--end-of-document", metavar="TOKEN", default=END_OF_DOCUMENT, help="put after each document; default "
        "%(default)s")  # fmt: skip
    add("--text-field", metavar="NAME", default="text", help="of .jsonl and .parquet; default %(default)s")
    add("--format", choices=("text", "completion", "chat"), default="text", help="what .jsonl and .parquet hold: "
        "texts; prompts with completions, which alone count in the loss; or messages, of which the assistant's count; "
        "default %(default)s")  # fmt: skip
    for option, format, meaning in FORMAT_OPTIONS:
        add(option, metavar="NAME", help=f"with --format {format}: {meaning}")
    add("--document-separator", metavar="REGEX", help="at whose matches text files are cut into documents")
    add("--strict", action="store_true", help="stop at a line that is no document, instead of leaving it out")
    add("--workers", metavar="N", help="processes that tokenise; default one per core")
    add("--sequence-length", metavar="L", help="work out now how documents are packed into sequences of L tokens, "
        "which training does otherwise")  # fmt: skip
    add("--packing", choices=("first_fit", "concatenate"), default="first_fit", help="default %(default)s")
    default = DataConfig.model_fields["held_out_fraction"].default
    add("--held-out-fraction", metavar="F", default=str(default), help="data.held_out_fraction of the training to "
        "come: what it holds out is not learned from, and packed apart; default %(default)s")  # fmt: skip
    options = parser.parse_args(arguments)
    options.workers = _number(options.workers, "--workers")
    options.sequence_length = _number(options.sequence_length, "--sequence-length")
    try:
        options.held_out_fraction = float(options.held_out_fraction)
    except ValueError:
        options.held_out_fraction = -1.0
    if not 0 <= options.held_out_fraction < 1:
        raise UserError("--held-out-fraction is no number from 0 to below 1, as in 0.1; give one")
    for option, format, _ in FORMAT_OPTIONS:
        value = vars(options)[option.removeprefix("--").replace("-", "_")]
        if value is not None and options.format != format:
            raise UserError(f"{option} {value} is for --format {format}, and that is {options.format}; leave it out")
    if options.format == "chat" and options.chat_template is None:
        raise UserError("--chat-template is missing; give the one that the tokenizer came with, or chatml or plain")
    try:
        check_tokenizer(options.tokenizer)
    except ValueError as error:
        raise UserError(f"--tokenizer {options.tokenizer}: {error}") from error
    try:
        if options.document_separator is not None:
            check_separator(options.document_separator)
    except ValueError as error:
        raise UserError(f"--document-separator {options.document_separator!r} {error}") from error
    return options


def _number(text: str | None, option: str) -> int | None:
    if text is not None and not (text.isdecimal() and 0 < int(text) < 2**31):
        raise UserError(f"{option} {text} is no number from 1 to 2^31; give one")
    return None if text is None else int(text)


def _prepare(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    # Loads NumPy and the like, which --help must not wait for.
    from rich.console import Console

    from dseekjax.data.preparation.pipeline import prepare_corpus
    from dseekjax.insight.preparation import PreparationProgress
    from dseekjax.platform import available_cores

    console = Console(soft_wrap=True, highlight=False, markup=False)
    output = Path(options.output).expanduser().absolute()
    if options.input:
        recipe = _recipe(options, console)
        was_there = output.exists()
        with PreparationProgress(console) as progress:
            manifest = prepare_corpus(recipe, output, workers=options.workers or available_cores(), watch=progress)
        if was_there:
            console.print(f"{output} holds just this already.")
        else:
            _tell_what_was_made(console, manifest, output, progress.rate)
    elif options.sequence_length is None:
        raise UserError("--input is missing; give the files to prepare, as in --input 'texts/**/*.txt'")
    if options.sequence_length is not None:
        _pack(options, output, console)
    console.print(f"Next:\n  {command_name('prepare')} inspect {shlex.quote(options.output)}")


def _recipe(options: argparse.Namespace, console: "Console") -> "Recipe":
    from dseekjax.data.preparation.learning import sample
    from dseekjax.data.preparation.pipeline import Recipe
    from dseekjax.data.reading.inputs import Format, find_inputs
    from dseekjax.data.sources import example_row
    from dseekjax.data.tokenizers import end_of_document_id, fingerprint, learned_size, ready_tokenizer, train_tokenizer

    with about("--input"):
        inputs = find_inputs(options.input)
    with about("--chat-template"):
        named = _format(options)
        example = None if named is None else example_row(named, options.end_of_document)
    format = Format(options.text_field, options.document_separator, options.strict, example)
    format.refuse_unused(inputs)
    size = learned_size(options.tokenizer)
    if size is None:
        with about("--tokenizer"):
            tokenizer = ready_tokenizer(options.tokenizer, options.end_of_document)
        with about("--end-of-document"):
            end_of_document_id(tokenizer, options.end_of_document)
        return Recipe(inputs, format, options.end_of_document, fingerprint(tokenizer), lambda: tokenizer)

    def learn() -> "tokenizers.Tokenizer":
        console.print(f"Learning a vocabulary of {size:,}.")
        return train_tokenizer(sample(inputs, format, options.held_out_fraction), size, options.end_of_document)

    return Recipe(inputs, format, options.end_of_document, f"train:{size} {options.held_out_fraction}", learn)


def _format(options: argparse.Namespace) -> CompletionConfig | ChatConfig | None:
    given = {
        "prompt_field": options.prompt_field,
        "completion_field": options.completion_field,
        "messages_field": options.messages_field,
        "template": options.chat_template,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if options.format == "completion":
        return CompletionConfig(**values)
    return ChatConfig(**values) if options.format == "chat" else None


def _tell_what_was_made(console: "Console", manifest: "Manifest", output: Path, rate: float) -> None:
    console.print(
        f"Prepared {manifest.num_inputs:,} files, {manifest.input_bytes / 1e6:,.1f} MB, at {rate / 1e6:,.1f} MB/s into "
        f"{output}:\n"
        f"{manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens in {manifest.dtype}, "
        f"{manifest.num_bytes / manifest.num_tokens:.2f} bytes of text per token."
    )
    left_out = manifest.left_out
    if left_out.num_empty:
        console.print(f"Left out {left_out.num_empty:,} documents of nothing but white space.")
    if left_out.num_malformed:
        console.print(f"Left out {left_out.num_malformed:,} lines that are no document:")
        for example in left_out.examples:
            console.print(f"  {example}")
        if left_out.num_malformed > len(left_out.examples):
            console.print("  …")


def _pack(options: argparse.Namespace, output: Path, console: "Console") -> None:
    from dseekjax.data.corpus import open_corpus
    from dseekjax.data.fitting import describe_cut
    from dseekjax.data.held_out import hold_out
    from dseekjax.data.packing import open_index

    corpus = open_corpus(output)
    if options.packing == "concatenate":
        console.print("Concatenated documents need no index: training cuts them as it reads.")
        return
    for portion in hold_out(corpus, options.held_out_fraction, "the text"):
        if portion is not None:
            if cut := describe_cut(portion, options.sequence_length, options.packing):
                console.print(cut)
            index = open_index(portion, options.sequence_length, console.print)
            filled = int(index.piece_lengths.sum()) / max(1, index.num_records * options.sequence_length)
            console.print(f"{portion.label}: {index.num_records:,} sequences, {filled:.1%} filled.")


def _inspect(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{command_name('prepare')} inspect", description="Shows what is in a corpus."
    )
    parser.add_argument("corpus", metavar="DIR", help="folder that was prepared")
    parser.add_argument("--sequence-length", metavar="L", default="1024", help="for packing; default %(default)s")
    parser.add_argument("--samples", metavar="N", default="3", help="documents to decode; default %(default)s")
    parser.add_argument("--picture", metavar="FILE", help="of the lengths of documents; default DIR/lengths.png")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, and make no picture")
    options = parser.parse_args(arguments)
    from dseekjax.data.corpus import open_corpus
    from dseekjax.data.inspection import inspect_corpus, plot_lengths, print_inspection

    length, samples = _number(options.sequence_length, "--sequence-length"), _number(options.samples, "--samples")
    corpus = open_corpus(Path(options.corpus).expanduser())
    inspection = inspect_corpus(corpus, length or 1, samples or 0)
    if options.json:
        print(inspection.model_dump_json(indent=2))
        return
    picture = Path(options.picture).expanduser() if options.picture else corpus.path / "lengths.png"
    print_inspection(inspection)
    plot_lengths(corpus, picture)
    print(f"\nLengths of documents are drawn in {picture}.")


def _verify(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{command_name('prepare')} verify", description="Reads every byte of a corpus and compares checksums."
    )
    parser.add_argument("corpus", metavar="DIR", help="folder that was prepared")
    options = parser.parse_args(arguments)
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from dseekjax.data.corpus import verify_corpus

    with Progress("verifying", BarColumn(24), DownloadColumn(), TransferSpeedColumn(), transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        manifest = verify_corpus(
            Path(options.corpus).expanduser(),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    size = sum(file.size for file in manifest.files.values())
    print(f"{options.corpus} is sound: {len(manifest.files)} files, {size / 1e6:,.1f} MB.")


if __name__ == "__main__":
    sys.exit(main())
