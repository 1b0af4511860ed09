"""The imperative shell around a Program: feed, record, evaluate, and let hooks save and show."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax

from dseekjax.errors import TrainingStoppedError
from dseekjax.models.flops import training_flops_per_token
from dseekjax.platform import memory_in_use, peak_flops
from dseekjax.training.evaluation import Evaluation
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.hooks import Context, Hook, Record
from dseekjax.training.interruption import Interruption
from dseekjax.training.program import Program
from dseekjax.training.records import PendingRecords
from dseekjax.training.state import TrainState


class Feed(Protocol):
    """Where batches come from."""

    def state(self, batch: int) -> dict[str, Any]:
        """What a checkpoint keeps so that batch number `batch` can be the next."""
        ...

    def start(self, state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """This process's rows of the batch that comes next in that state, and of all that follow."""
        ...


class Trainer:
    """Runs a Program from where its hooks restore it, or from the start, to `train.steps`."""

    def __init__(
        self,
        program: Program,
        feed: Feed,
        *,
        evaluation: Evaluation | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """
        Args:
            program: what to run.
            feed: where batches come from.
            evaluation: called every `evaluation.every_steps` and after the last step.
            hooks: called in this order.
        """
        self.program = program
        self._feed = feed
        self._evaluation = evaluation
        self._hooks = hooks
        config = program.config
        peak = config.run.peak_flops_per_device or peak_flops(jax.devices()[0].device_kind)
        self.stopped_by: signal.Signals | None = None
        """The signal that ended `run` early, if one did."""
        self._records = PendingRecords(
            self._emit,
            config.train.global_batch_size * config.data.sequence_length,
            training_flops_per_token(config.model, config.data.sequence_length),
            None if peak is None else peak * program.mesh.size,
        )

    def run(self) -> Context:
        """Trains; returns where it ended, which is before `train.steps` if a signal stopped it.

        Raises:
            TrainingStoppedError: `train.max_bad_steps` steps in a row could not be used.
        """
        try:
            # The compiler works beside whatever the state comes from: initialisation, or a checkpoint.
            beside = ThreadPoolExecutor(1, thread_name_prefix="compile")
            compiling = beside.submit(self.program.compile_ahead)
            # Takes nothing more, and is not waited for by an error of the hooks.
            beside.shutdown(wait=False)
            context = self._start()
            state = context.state or self.program.init()
            compiling.result()
            return self._run(context, state)
        except BaseException as error:
            for hook in self._hooks:
                hook.on_exception(error)
            raise
        finally:
            self._records.close()
            for hook in reversed(self._hooks):
                hook.close()

    def _start(self) -> Context:
        context = self._context(0, None)
        for hook in self._hooks:
            context = hook.on_start(context) or context
        return context

    def _run(self, context: Context, state: TrainState) -> Context:
        config, program = self.program.config, self.program
        rows = rows_of_process(program.batch_shape)
        batches = self._feed.start(context.data)
        with Interruption() as interruption:
            while context.step < context.total_steps and not context.last:
                self._records.resume()
                waiting = time.perf_counter()
                batch = to_devices(next(batches), rows, program.batch_shape)
                waited = time.perf_counter() - waiting
                state, metrics = program.train_step(state, batch)
                step = context.step + 1
                last = step == context.total_steps or interruption.stop_after(step)
                context = self._context(step, state, last)
                self._records.push(step, metrics, {"data_wait_seconds": waited, "memory_bytes": memory_in_use()})
                if self._evaluation and (step % config.evaluation.every_steps == 0 or step == context.total_steps):
                    self._records.wait()
                    self._records.amend(self._evaluation(state))
                for hook in self._hooks:
                    hook.on_step(context)
            context.flush()
        self.stopped_by = interruption.received
        return context

    def _context(self, step: int, state: Any, last: bool = False) -> Context:
        return Context(step, self.program.config.train.steps, self._feed.state(step), state, last, self._flush)

    def _emit(self, record: Record) -> None:
        for hook in self._hooks:
            hook.on_record(record)
        limit = self.program.config.train.max_bad_steps
        if (record["bad_steps"] or 0) >= limit:
            raise TrainingStoppedError(
                f"stopped at step {record['step']:.0f}: the loss or its gradient was not finite for {limit} steps in a "
                "row; the last good checkpoint is kept: lower optimizer.learning_rate or look at the data, and start a "
                "new run from it with train.initialize_from"
            )

    def _flush(self) -> None:
        self._records.drain()
        for hook in self._hooks:
            hook.flush()
