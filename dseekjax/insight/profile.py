"""A trace of a few steps."""

from pathlib import Path

import jax

from dseekjax.training.hooks import Context, Hook

WARM_UP_STEPS = 2


class ProfileHook(Hook):
    """Traces `num_steps` steps, from the third of this process on, for TensorBoard or Perfetto to show."""

    def __init__(self, directory: Path, num_steps: int) -> None:
        self._directory = directory
        self._num_steps = num_steps
        self._first: int | None = None
        self._tracing = False

    def on_step(self, context: Context) -> None:
        if self._first is None:
            self._first = context.step + WARM_UP_STEPS - 1
        if context.step == self._first:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True
        if self._tracing and (context.step == self._first + self._num_steps or context.last):
            jax.block_until_ready(context.state)
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
