"""Progress in the terminal: a live line where there is one, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dseekjax.training.hooks import Context, Hook, Record


class TerminalHook(Hook):
    """Shows step, loss, tokens per second and the time left."""

    def __init__(self, console: Console, every_steps: int) -> None:
        self._console = console
        self._every_steps = every_steps
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def on_start(self, context: Context) -> None:
        self._total = context.total_steps
        self._began: float | None = None
        self._task = self._progress.add_task("training", total=self._total, completed=context.step, status="compiling")
        self._progress.start()

    def on_record(self, record: Record) -> None:
        step = int(record["step"] or 0)
        now = time.perf_counter()
        if self._began is None:
            self._began, self._first = now, step
        left = "-:--"
        if step > self._first:
            left = _clock((now - self._began) / (step - self._first) * (self._total - step))
        status = f"loss {_number(record['loss'])}"
        status += f"  {record['tokens_per_second']:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, status=f"{status}  {left} left")
        if "eval_loss" in record:
            self._console.print(
                f"step {step}  held-out loss {_number(record['eval_loss'])}"
                f"  {_number(record['eval_bits_per_byte'])} bits per byte",
                highlight=False,
            )
        if step % self._every_steps == 0 or step == self._total:
            self._console.print(f"step {step}/{self._total}  {status}  {left} left", highlight=False)

    def close(self) -> None:
        self._progress.stop()


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
