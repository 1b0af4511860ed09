"""Evaluates a trained model: `python -m dseekjax.evaluate --run runs/quickstart`."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError, about
from dseekjax.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from dseekjax.data.corpus import Portion
    from dseekjax.data.reading.inputs import Format
    from dseekjax.evaluation.results import Result
    from dseekjax.evaluation.sources import SourceLoss
    from dseekjax.evaluation.tasks import Task
    from dseekjax.trained import Trained

DESCRIPTION = """\
Evaluates the newest checkpoint of a run, which may still be training. Without --data and --tasks, on what the run
holds out: then the numbers are those that training shows."""

EPILOG = """\
A task is a file with an item to a line, {"context": …, "choices": […], "answer": 0} with the number of the right
choice, or {"context": …, "continuation": …}. What follows the context follows it directly: give the space before it.
--tasks builtin:emma_endings is an example that is shipped."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_status(lambda: _evaluate(_parse(sys.argv[1:] if arguments is None else arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("evaluate"),
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", metavar="DIR", required=True, help="folder of the run")
    add("--data", metavar="PATH", nargs="+", action="extend", default=[], help="texts, each a folder that was "
        "prepared, a file or a pattern of files; see data.sources. Completions and chats are prepared first, with "
        "--format of the prepare command")  # fmt: skip
    add("--document-separator", metavar="REGEX", help="at whose matches text files of --data are cut into documents")
    add("--text-field", metavar="NAME", default="text", help="of .jsonl and .parquet; default %(default)s")
    add("--max-batches", metavar="N", help="batches of each text; default all, and of what is held out "
        "evaluation.max_batches")  # fmt: skip
    add("--tasks", metavar="FILE", nargs="+", action="extend", default=[], help="JSON lines, see below")
    add("--output", metavar="FILE", help="write the scores of every item of --tasks there, as JSON lines")
    add("--json", action="store_true", help="print figures as JSON")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="on top of the run's config, as in mesh.data=2")
    options = parser.parse_intermixed_args(arguments)
    for option in (options.data, options.tasks):
        options.overrides += [word for word in option if _is_override(word)]
        option[:] = [word for word in option if not _is_override(word)]
    if options.max_batches is not None and not (options.max_batches.isdecimal() and int(options.max_batches) > 0):
        raise UserError(f"--max-batches {options.max_batches} is no number from 1 on; give one")
    if options.output and not options.tasks:
        raise UserError(f"--output {options.output} is for the items of --tasks, and there are none; leave it out")
    for option in ("document_separator", "text_field"):
        if getattr(options, option) != parser.get_default(option) and not options.data:
            raise UserError(f"--{option.replace('_', '-')} is for --data, and there is none; leave it out")
    return options


def _evaluate(options: argparse.Namespace) -> int:
    # What is wrong with these files is told before JAX takes its time.
    from dseekjax.evaluation.tasks import read_tasks

    with about("--tasks"):
        tasks = [task for pattern in options.tasks for task in read_tasks(pattern)]
    file_format = _text_format(options)
    if options.output:
        if Path(options.output).expanduser().resolve() in [task.path.resolve() for task in tasks]:
            raise UserError(f"--output {options.output} is a file of --tasks, which it would replace; choose another")
        with _writing(options.output), open(Path(options.output).expanduser(), "a"):
            pass

    import jax
    from rich.console import Console

    from dseekjax.evaluation.presentation import as_json, as_line, print_results
    from dseekjax.trained import open_trained

    notes = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    trained = open_trained(options.run, options.overrides, tell=notes.print)
    notes.quiet = jax.process_index() > 0
    losses = _losses(trained, options, file_format, notes) if options.data or not tasks else []
    results = _results(trained, tasks, notes)
    if jax.process_index() > 0:
        return 0
    if options.json:
        print(as_json(trained.path, trained.step, losses, results))
    else:
        print_results(trained.path, trained.step, losses, results)
    if options.output:
        items = [item for result in results for item in result.items]
        with _writing(options.output):
            write_whole(Path(options.output).expanduser(), "".join(map(as_line, items)))
    return 0


def _is_override(word: str) -> bool:
    """Whether a word, among the paths of an option, sets a key of the config."""
    from dseekjax.config import Config

    return re.match(rf"({'|'.join(Config.model_fields)})\.[\w.\[\]]+=", word) is not None


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror}); choose another") from error


def _text_format(options: argparse.Namespace) -> "Format":
    """How the files of --data are read."""
    from dseekjax.data.config import check_separator
    from dseekjax.data.reading.inputs import Format, find_inputs

    if options.document_separator is not None:
        try:
            check_separator(options.document_separator)
        except ValueError as error:
            raise UserError(f"--document-separator {options.document_separator!r} {error}") from error
    file_format = Format(options.text_field, options.document_separator)
    with about("--data"):
        inputs = find_inputs([path for path in options.data if not Path(path).expanduser().is_dir()])
        if options.data:
            file_format.refuse_unused(inputs)
    return file_format


def _losses(
    trained: "Trained", options: argparse.Namespace, file_format: "Format", notes: "Console"
) -> list["SourceLoss"]:
    from dseekjax.evaluation.presentation import EvaluationProgress
    from dseekjax.evaluation.scorer import Scorer
    from dseekjax.evaluation.sources import source_loss
    from dseekjax.evaluation.texts import given_texts, held_out_texts
    from dseekjax.insight.preparation import PreparationProgress
    from dseekjax.platform import available_cores

    max_batches = int(options.max_batches) if options.max_batches else None
    portions: Sequence[Portion]
    workers, tell = available_cores(), notes.print
    with PreparationProgress(notes) as watch:
        if options.data:
            with about("--data"):
                portions = given_texts(trained, options.data, file_format, workers=workers, tell=tell, watch=watch)
        else:
            portions = held_out_texts(trained, workers=workers, tell=tell, watch=watch)
            max_batches = max_batches or trained.config.evaluation.max_batches
    scorer = Scorer(trained.program, trained.params)
    with EvaluationProgress(notes) as progress:
        return [
            source_loss(
                scorer,
                portion,
                trained.config.data,
                max_batches=max_batches,
                tell=tell,
                watch=progress.watch(portion.label),
            )
            for portion in portions
        ]


def _results(trained: "Trained", tasks: Sequence["Task"], notes: "Console") -> list["Result"]:
    from dseekjax.evaluation.presentation import EvaluationProgress
    from dseekjax.evaluation.results import run_task

    with EvaluationProgress(notes) as progress:
        return [run_task(trained, task, tell=notes.print, watch=progress.watch(task.name)) for task in tasks]


if __name__ == "__main__":
    sys.exit(main())
