"""What comes of a task."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dseekjax.errors import UserError
from dseekjax.evaluation.likelihood import Likelihood, RequestError, log_likelihood
from dseekjax.evaluation.scorer import Watch, nobody
from dseekjax.evaluation.sources import perplexity
from dseekjax.evaluation.tasks import Choice, Continuation, Task
from dseekjax.trained import Trained


@dataclass(frozen=True)
class Share:
    """How many of the items hold something."""

    value: float
    standard_error: float | None
    """Of the mean of as many draws; None of a single one."""

    @classmethod
    def of(cls, holds: Sequence[bool]) -> "Share":
        """The share of items for which it holds."""
        value, count = sum(holds) / len(holds), len(holds)
        return cls(value, math.sqrt(value * (1 - value) / (count - 1)) if count > 1 else None)


@dataclass(frozen=True)
class ChoiceResult:
    """Of a task of choices."""

    name: str
    accuracy: Share
    """The choice with the highest log-probability is the right one."""
    accuracy_per_byte: Share
    """The same, of log-probabilities over bytes of UTF-8, so that short choices have no advantage."""
    chance: float
    """Accuracy of guessing."""
    items: list[dict[str, Any]] = field(repr=False)
    """Scores of every item, for JSON."""


@dataclass(frozen=True)
class ContinuationResult:
    """Of a task of continuations."""

    name: str
    log_probability: float
    """Nats, of all continuations."""
    perplexity: float
    """Per token."""
    bits_per_byte: float
    greedy: Share
    """Greedy decoding would give the continuation."""
    num_tokens: int
    items: list[dict[str, Any]] = field(repr=False)


Result = ChoiceResult | ContinuationResult


def run_task(
    trained: Trained,
    task: Task,
    *,
    tell: Callable[[str], None] = lambda sentence: None,
    watch: Watch = nobody,
) -> Result:
    """Scores all items of a task; arguments as of `log_likelihood`.

    Raises:
        UserError: a continuation is too long for the model.
    """
    requests: list[tuple[str, str]] = []
    lines: list[int] = []
    for item in task.items:
        continuations = item.choices if isinstance(item, Choice) else (item.continuation,)
        requests += [(item.context, continuation) for continuation in continuations]
        lines += [item.line] * len(continuations)
    try:
        likelihoods = log_likelihood(trained, requests, tell=lambda s: tell(f"{task.name}: {s}"), watch=watch)
    except RequestError as error:
        raise UserError(f"{task.name} line {lines[error.number]} has {error.reason}") from error
    choices = [item for item in task.items if isinstance(item, Choice)]
    if choices:
        return _of_choices(task.name, choices, likelihoods)
    return _of_continuations(task.name, [item for item in task.items if isinstance(item, Continuation)], likelihoods)


def _of_choices(name: str, items: Sequence[Choice], likelihoods: Sequence[Likelihood]) -> ChoiceResult:
    scored: list[dict[str, Any]] = []
    first = 0
    for item in items:
        own = likelihoods[first : first + len(item.choices)]
        first += len(item.choices)
        totals = [likelihood.log_probability for likelihood in own]
        per_byte = [total / len(choice.encode()) for total, choice in zip(totals, item.choices, strict=True)]
        scored.append(
            {
                "task": name,
                "line": item.line,
                "answer": item.answer,
                "chosen": totals.index(max(totals)),
                "chosen_per_byte": per_byte.index(max(per_byte)),
                "log_probabilities": totals,
                "num_tokens": [likelihood.num_tokens for likelihood in own],
                "num_bytes": [len(choice.encode()) for choice in item.choices],
            }
        )
    return ChoiceResult(
        name,
        Share.of([item["chosen"] == item["answer"] for item in scored]),
        Share.of([item["chosen_per_byte"] == item["answer"] for item in scored]),
        sum(1 / len(item.choices) for item in items) / len(items),
        scored,
    )


def _of_continuations(
    name: str, items: Sequence[Continuation], likelihoods: Sequence[Likelihood]
) -> ContinuationResult:
    scored = [
        {
            "task": name,
            "line": item.line,
            "log_probability": likelihood.log_probability,
            "num_tokens": likelihood.num_tokens,
            "num_bytes": len(item.continuation.encode()),
            "is_greedy": likelihood.is_greedy,
        }
        for item, likelihood in zip(items, likelihoods, strict=True)
    ]
    total = sum(likelihood.log_probability for likelihood in likelihoods)
    num_tokens = sum(likelihood.num_tokens for likelihood in likelihoods)
    num_bytes = sum(len(item.continuation.encode()) for item in items)
    return ContinuationResult(
        name,
        total,
        perplexity(-total / num_tokens),
        -total / math.log(2) / num_bytes,
        Share.of([likelihood.is_greedy for likelihood in likelihoods]),
        num_tokens,
        scored,
    )
