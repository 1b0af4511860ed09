"""The parameters of a run alone, for whoever does not go on with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.checkpoint.store import CheckpointStore, DamagedCheckpointError
from dseekjax.errors import UserError
from dseekjax.training.state import TrainState


@dataclass(frozen=True)
class Parameters:
    """What a checkpoint holds of a model, and where it comes from."""

    params: Any
    """As in `TrainState`, on the placements that were asked for."""
    step: int
    config: dict[str, Any]
    """That it was trained with, as JSON has it."""
    data: dict[str, Any]
    """What tells the data that it was trained on from others, and where training is in it; empty of an import."""


def read_parameters(checkpoints: Path, state_shape: TrainState) -> Parameters:
    """Reads the newest parameters of a run, which may be training.

    Args:
        checkpoints: the folder of its checkpoints.
        state_shape: shapes and placements.

    Raises:
        UserError: there is no checkpoint, it is damaged, or of another model.
    """
    run = checkpoints.parent
    if not checkpoints.is_dir():
        raise UserError(f"{run}: no run with checkpoints there; give one's run.dir")
    store = CheckpointStore.read_only(checkpoints)
    try:
        steps = store.steps()
        if not steps:
            raise UserError(f"{run}: that run has no checkpoint yet, wait for one")
        *older, step = steps
        params, config, data = store.restore_params(step, state_shape)
    except DamagedCheckpointError as error:
        cure = (
            f"move {checkpoints / str(step)} away to use that of step {older[-1]}"
            if older
            else "it has no other, so put a sound one back"
        )
        raise UserError(f"{run}: its checkpoint of step {step} is damaged ({error}); {cure}") from error
    finally:
        store.close()
    return Parameters(params, step, config, data)


def write_parameters(checkpoints: Path, params: Any, config: CheckpointConfig, saved_config: dict[str, Any]) -> None:
    """Makes a run's first checkpoint, of step 0, with parameters alone: other runs can start from it.

    Args:
        checkpoints: the folder for it.
        params: as in `TrainState`.
        config: as for training.
        saved_config: the whole config, kept with it.

    Raises:
        UserError: it cannot be written.
    """
    store = CheckpointStore(checkpoints, config)
    store.save_params(0, params, saved_config)
    store.close()
