"""Checkpoints attached to the training loop."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.checkpoint.parameters import read_parameters
from dseekjax.checkpoint.store import CheckpointStore, DamagedCheckpointError
from dseekjax.errors import UserError, about
from dseekjax.training.hooks import Context, Hook
from dseekjax.training.state import TrainState


class CheckpointHook(Hook):
    """Restores the newest sound checkpoint at the start, saves at intervals and at the end."""

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        state_shape: TrainState,
        saved_config: dict[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: of the checkpoints.
            config: when to save and what to keep.
            state_shape: what to restore, and where to.
            saved_config: the whole config, kept with every checkpoint.
            tell: called with sentences for the user.
        """
        self._config = config
        self._state_shape = state_shape
        self._saved_config = saved_config
        self._tell = tell
        self._store = CheckpointStore(directory, config)
        self._saved_step: int | None = None

    def on_start(self, context: Context) -> Context | None:
        found = self.newest_sound(context.data)
        if found is None:
            return None
        step, state, data = found
        self._saved_step = step
        self._tell(f"Resuming from step {step}.")
        return dataclasses.replace(context, step=step, state=state, data=data)

    def newest_sound(self, data: Mapping[str, Any]) -> tuple[int, TrainState, dict[str, Any]] | None:
        """Step, state and the data's part of the newest checkpoint that can be read, after moving damaged ones away.

        Args:
            data: what it should have been trained on.

        Raises:
            UserError: none of the checkpoints can be read, or it was trained on other data.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._store.steps()):
            try:
                state, saved = self._store.restore(step, self._state_shape)
            except DamagedCheckpointError as error:
                damaged[step] = str(error)
                continue
            # Of older checkpoints it is not known what was held out, but what was trained on.
            if any(part in saved and saved[part] != data.get(part) for part in ("identity", "held_out")):
                raise UserError(
                    "data.sources or data.evaluation_sources: what they hold, or how it is cut, changed since this run "
                    "began; put back what it began with, or choose another run.dir"
                )
            # Only now, when there is something to go on from, may they leave their place.
            for bad, reason in damaged.items():
                place = self._store.set_aside(bad)
                self._tell(f"The checkpoint of step {bad} is damaged ({reason}); moved it to {place}.")
            return step, state, saved
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"none of the {len(damaged)} checkpoints of this run can be read (step {newest}: {damaged[newest]}); "
                "put sound ones back, or start over with --fresh"
            )
        return None

    def on_step(self, context: Context) -> None:
        self._store.check()
        if context.step % self._config.every_steps == 0 or context.last:
            self._save(context)

    def _save(self, context: Context) -> None:
        if context.step == self._saved_step or context.state is None:
            return
        # Records must be safe before the checkpoint that goes on after them.
        context.flush()
        self._store.save(context.step, context.state, context.data, self._saved_config)
        self._saved_step = context.step
        if context.last:
            self._store.wait()

    def close(self) -> None:
        try:
            self._store.close()
        except Exception as error:
            self._tell(f"The checkpoint of step {self._saved_step} could not be written ({error}).")


class InitializeHook(Hook):
    """Starts a new run from the parameters of another."""

    def __init__(
        self,
        directory: Path,
        init: Callable[[], TrainState],
        state_shape: TrainState,
        model: dict[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: of the other run's checkpoints.
            init: makes the rest of the state.
            state_shape: what is restored, and where to.
            model: this run's model config; what differs from the other's is told.
            tell: called with sentences for the user.
        """
        self._directory = directory
        self._init = init
        self._state_shape = state_shape
        self._model = model
        self._tell = tell

    def on_start(self, context: Context) -> Context | None:
        if context.state is not None:
            return None
        with about("train.initialize_from"):
            found = read_parameters(self._directory, self._state_shape)
        for key, value in self._model.items():
            if found.config["model"].get(key) != value:
                self._tell(f"Note: model.{key} was {found.config['model'].get(key)!r} there and is {value!r} here.")
        self._tell(f"Starting from the parameters of {self._directory.parent} at step {found.step}.")
        # What is made by jit and thrown away costs one more copy for a moment, and keeps one way to make a state.
        return dataclasses.replace(context, state=dataclasses.replace(self._init(), params=found.params))
