"""What can be attached to the training loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dseekjax.training.state import TrainState

Record = dict[str, float | None]
"""One flat record per step; None stands for what cannot be told or is not finite."""


@dataclass(frozen=True)
class Context:
    """Where the loop stands between two steps."""

    step: int
    """Steps done."""
    total_steps: int
    data: dict[str, Any]
    """What the data needs to go on from here."""
    state: TrainState | None = None
    """None until a hook restores one or the loop makes one."""
    last: bool = False
    """Whether the loop ends here."""
    flush: Callable[[], None] = lambda: None
    """Waits until the records of all steps done have reached every hook, and their files."""


class Hook:
    """Something that the loop calls. Every method does nothing by default."""

    def on_start(self, context: Context) -> Context | None:
        """Before the first step, in the hooks' order; a returned context takes the place of the given one."""

    def on_step(self, context: Context) -> None:
        """After a step was handed to the devices; its arrays may still be under way."""

    def on_record(self, record: Record) -> None:
        """When a step's numbers have arrived, a step or two later."""

    def flush(self) -> None:
        """Makes what was recorded safe from a crash."""

    def on_exception(self, error: BaseException) -> None:
        """When the loop fails, before `close`."""

    def close(self) -> None:
        """When the loop is over, in whatever way."""
