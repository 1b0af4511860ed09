"""Checkpoints of a run on disk, through Orbax."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.checkpoint.fingerprint import checksums
from dseekjax.checkpoint.layout import flatten, join, split
from dseekjax.checkpoint.path import checkpoint_path
from dseekjax.errors import UserError
from dseekjax.training.processes import on_all_processes, on_first_process
from dseekjax.training.state import TrainState


class DamagedCheckpointError(Exception):
    """A checkpoint cannot be read, or holds other bits than were saved."""


class CheckpointStore:
    """The checkpoints in one directory, a folder per step. A checkpoint appears whole or not at all."""

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        """
        Args:
            directory: made if it is not there.
            config: which checkpoints to keep.

        Raises:
            UserError: its path has a name that checkpoints cannot be written below.
        """
        kept: list[Any] = [preservation_policy.LatestN(config.keep_last)]
        if config.keep_every is not None:
            kept.append(preservation_policy.EveryNSteps(config.keep_every))
        self._open(
            directory,
            ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(kept),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
        )

    @classmethod
    def read_only(cls, directory: Path) -> Self:
        """The checkpoints of a directory that another process may be writing to: nothing there is touched."""
        store = cls.__new__(cls)
        store._open(directory, ocp.CheckpointManagerOptions(read_only=True))
        return store

    def _open(self, directory: Path, options: ocp.CheckpointManagerOptions) -> None:
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(
            checkpoint_path(directory),
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=options,
        )

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Copies `state` out of the devices and writes it in the background.

        Raises:
            UserError: an earlier save, or the start of this one, failed.
        """
        items = split(state)
        meta = _signed(
            {
                "step": step,
                "data": dict(data),
                "config": dict(config),
                "checksums": {name: checksums(arrays) for name, arrays in items.items()},
            }
        )
        arguments = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items()}
        with _SavingErrors(self._directory):
            self._manager.save(step, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **arguments), force=True)

    def save_params(self, step: int, params: Any, config: Mapping[str, Any]) -> None:
        """Writes parameters alone, of which runs can start and none can go on.

        Raises:
            UserError: they cannot be written.
        """
        arrays = flatten(params)
        meta = _signed({"step": step, "config": dict(config), "checksums": {"params": checksums(arrays)}})
        items = ocp.args.Composite(meta=ocp.args.JsonSave(meta), params=ocp.args.StandardSave(arrays))
        try:
            self._manager.save(step, args=items, force=True)
            self._manager.wait_until_finished()
        except Exception as error:
            raise UserError(
                f"cannot write parameters to {self._directory} ({_reason(error)}); make room there, or choose another "
                "folder"
            ) from error

    def check(self) -> None:
        """Raises UserError if a save in the background has failed."""
        with _SavingErrors(self._directory):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits for saves in the background; raises UserError if one has failed."""
        with _SavingErrors(self._directory):
            self._manager.wait_until_finished()

    def restore(self, step: int, shape: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint onto the placements of `shape`; returns the state and the data's part.

        Raises:
            UserError: the checkpoint is of another model.
            DamagedCheckpointError: the checkpoint is damaged.
        """
        items, meta = self._read(step, split(shape))
        return join(items, shape), meta["data"]

    def restore_params(self, step: int, shape: TrainState) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Reads only the parameters, the config that they were trained with, and the data's part; raises as `restore`.

        What was saved by `save_params` has no data's part: it is empty.
        """
        items, meta = self._read(step, {"params": split(shape)["params"]})
        params = join({"params": items["params"], "state": split(shape)["state"]}, shape).params
        return params, meta["config"], meta.get("data", {})

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way, and tells where to."""
        target = self._directory.with_name(f"{self._directory.name}-damaged") / str(step)

        def move() -> None:
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)

        on_first_process(move)
        self._manager.reload()
        return target

    def close(self) -> None:
        self._manager.close()

    def _read(
        self, step: int, shapes: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]:
        try:
            metadata = self._manager.item_metadata(step)
            if "state" in shapes and not (self._directory / str(step) / "state").exists():
                self._refuse_params_alone(step)
            saved = {item: dict(metadata[item].tree) for item in shapes}
        except (UserError, DamagedCheckpointError):
            raise
        except Exception as error:
            _raise_if_not_damage(error, self._directory / str(step))
            raise _damage(self._directory / str(step), shapes) from error
        for item, wanted in shapes.items():
            _refuse_other_model(self._directory / str(step), saved[item], wanted)
        arguments = {item: ocp.args.StandardRestore(wanted) for item, wanted in shapes.items()}
        failure, restored = None, None
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore(), **arguments))
        except Exception as error:
            failure = error
        # The checksums are taken by all processes together, so all must have come this far.
        if not on_all_processes(failure is None) or restored is None:
            failure = failure or OSError("another process could not read it")
            _raise_if_not_damage(failure, self._directory / str(step))
            raise _damage(self._directory / str(step), shapes) from failure
        _refuse_damaged_meta(restored["meta"], step, shapes)
        for item in shapes:
            for name, value in checksums(restored[item]).items():
                if restored["meta"]["checksums"][item].get(name) != value:
                    raise DamagedCheckpointError(f"the checksum of {name} does not match")
        return {item: restored[item] for item in shapes}, restored["meta"]

    def _refuse_params_alone(self, step: int) -> None:
        """Raises UserError if nothing but parameters was ever saved; what has lost its state is damaged."""
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        _refuse_damaged_meta(meta, step, ("params",))
        if "data" not in meta:
            raise UserError(
                f"{self._directory / str(step)} holds parameters alone, without what training goes on from; start "
                f"another run from them: train.initialize_from={self._directory.parent} and another run.dir"
            )


def _signed(meta: dict[str, Any]) -> dict[str, Any]:
    return {**meta, "sha256": _digest(meta)}


def _digest(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _refuse_damaged_meta(meta: Any, step: int, items: Iterable[str]) -> None:
    """Raises DamagedCheckpointError if what is kept beside the arrays is not what was saved."""
    sections = ["config", "checksums", *(["data"] if "state" in items else [])]
    if not isinstance(meta, dict) or not all(isinstance(meta.get(name), dict) for name in sections):
        raise DamagedCheckpointError("its meta is not what was saved")
    rest = {name: value for name, value in meta.items() if name != "sha256"}
    # Older checkpoints have neither.
    if meta.get("sha256", _digest(rest)) != _digest(rest) or meta.get("step", step) != step:
        raise DamagedCheckpointError("its meta is not what was saved")
    if not all(isinstance(meta["checksums"].get(item), dict) for item in items):
        raise DamagedCheckpointError("its meta is not what was saved")


def _damage(path: Path, items: Iterable[str]) -> DamagedCheckpointError:
    """In words of the checkpoint: what the library says of a broken one is about its own insides."""
    missing = [item for item in (*items, "meta") if not (path / item).is_dir()]
    return DamagedCheckpointError(
        f"there is no {' and no '.join(missing)} in it" if missing else "files of it are missing, cut short or changed"
    )


def _raise_if_not_damage(error: Exception, path: Path) -> None:
    """What the machine lacks says nothing about the checkpoint: nobody may set a sound one aside for it."""
    lacking = ("RESOURCE_EXHAUSTED", "Permission denied", "Too many open files", "Input/output error")
    if isinstance(error, MemoryError) or any(word in str(error) for word in lacking):
        raise UserError(f"cannot read the checkpoint {path} ({_reason(error)}); mend that and run again") from error


def latest_step(directory: Path) -> int | None:
    """The step of the newest whole checkpoint in a directory, without opening it."""
    steps = ocp.utils.checkpoint_steps(checkpoint_path(directory)) if directory.is_dir() else []
    return max(steps, default=None)


def _refuse_other_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in sorted({*saved, *wanted}):
        theirs = tuple(saved[name].shape) if name in saved else None
        ours = tuple(wanted[name].shape) if name in wanted else None
        if theirs != ours:
            here = "has no such array" if ours is None else f"needs {ours}"
            there = "is missing there" if theirs is None else f"is {theirs} there"
            raise UserError(
                f"the checkpoint {path} is of another model: {name} {there}, this config {here}; use the config that "
                "it was trained with, or another run.dir"
            )


class _SavingErrors:
    """Turns what a save raises into one sentence."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            kept = latest_step(self._directory)
            go_on = "from the start" if kept is None else f"from step {kept}"
            raise UserError(
                f"cannot save a checkpoint to {self._directory} ({_reason(error)}); make room there or choose "
                f"another run.dir, and run again: training goes on {go_on}"
            ) from error


def _reason(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if " [os_error_code" in line:
        # Every layer of the storage stack adds a prefix; what the system said comes last.
        return line.partition(" [os_error_code")[0].rpartition(": ")[2]
    return line[:200]
