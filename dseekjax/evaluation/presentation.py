"""Results of an evaluation, for people and for programs, and how far it has come."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dseekjax.evaluation.results import ChoiceResult, ContinuationResult, Result, Share
from dseekjax.evaluation.scorer import Watch
from dseekjax.evaluation.sources import SourceLoss, total

UNFOLDED_WIDTH = 1 << 16


class EvaluationProgress:
    """A bar of batches for each text or task, where there is a terminal, and until it is left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def watch(self, name: str) -> Watch:
        """What is to be called after each batch of what is named so."""
        task = self._progress.add_task(name, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)


def print_results(run: Path, step: int, losses: Sequence[SourceLoss], results: Sequence[Result]) -> None:
    """Prints a table for each kind of result that there is."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else UNFOLDED_WIDTH)
    console.print(f"{run}, step {step}", soft_wrap=True)
    if losses:
        rows = [*losses, total(losses)] if len(losses) > 1 else losses
        console.print()
        console.print(
            _table(
                ("text", "loss", "perplexity", "bits per byte", "predicted", "tokens", "bytes"),
                [
                    (
                        loss.name,
                        _number(loss.loss),
                        _number(loss.perplexity),
                        _number(loss.bits_per_byte),
                        *(f"{count:,}" for count in (loss.num_targets, loss.num_tokens, loss.num_bytes)),
                    )
                    for loss in rows
                ],
            )
        )
    choices = [result for result in results if isinstance(result, ChoiceResult)]
    if choices:
        console.print()
        console.print(
            _table(
                ("choices", "accuracy", "by log-probability per byte", "guessing", "items"),
                [
                    (
                        result.name,
                        _share(result.accuracy),
                        _share(result.accuracy_per_byte),
                        f"{result.chance:.1%}",
                        f"{len(result.items):,}",
                    )
                    for result in choices
                ],
            )
        )
    continuations = [result for result in results if isinstance(result, ContinuationResult)]
    if continuations:
        console.print()
        console.print(
            _table(
                ("continuations", "log-probability", "perplexity", "bits per byte", "greedy", "tokens", "items"),
                [
                    (
                        result.name,
                        f"{result.log_probability:,.2f}",
                        _number(result.perplexity),
                        _number(result.bits_per_byte),
                        _share(result.greedy),
                        f"{result.num_tokens:,}",
                        f"{len(result.items):,}",
                    )
                    for result in continuations
                ],
            )
        )


def as_json(run: Path, step: int, losses: Sequence[SourceLoss], results: Sequence[Result]) -> str:
    """All figures; null for what is not finite."""
    return json.dumps(
        _finite(
            {
                "run": str(run),
                "step": step,
                "texts": [_of_loss(loss) for loss in losses],
                "all_texts": _of_loss(total(losses)) if losses else None,
                "tasks": [_of_result(result) for result in results],
            }
        ),
        indent=2,
    )


def as_line(item: dict[str, Any]) -> str:
    """The scores of an item as a line of JSON; null for what is not finite."""
    return json.dumps(_finite(item), ensure_ascii=False) + "\n"


def _of_loss(loss: SourceLoss) -> dict[str, Any]:
    figures = {name: getattr(loss, name) for name in ("loss", "perplexity", "bits_per_byte")}
    return {**dataclasses.asdict(loss), **figures}


def _of_result(result: Result) -> dict[str, Any]:
    shallow = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    figures = {
        name: dataclasses.asdict(value) if isinstance(value, Share) else value for name, value in shallow.items()
    }
    return {**figures, "items": len(result.items)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float) -> str:
    return f"{value:,.4f}" if math.isfinite(value) else "not finite"


def _share(share: Share) -> str:
    error = "" if share.standard_error is None else f" ± {share.standard_error:.1%}"
    return f"{share.value:.1%}{error}"
