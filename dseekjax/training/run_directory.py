"""The folder of a run: what is in it, and whether a config may go on in it."""

import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

from dseekjax.config import Config, flat_config, load_config
from dseekjax.errors import UserError
from dseekjax.files import write_whole
from dseekjax.training.hooks import Context, Hook

CHANGEABLE = (
    "run.dir",
    "run.virtual_devices",
    "run.tune_cpu",
    "run.compilation_cache_dir",
    "run.profile_steps",
    "run.peak_flops_per_device",
    "model.scan_layers",
    "train.steps",
    "train.max_bad_steps",
    "data.cache_dir",
    "data.prefetch_batches",
    "mesh.",
    "distributed.",
    "checkpoint.",
    "evaluation.",
    "insight.",
)
"""Keys that a run may be resumed with other values of; what stands with a dot is a whole section."""

CHANGEABLE_OF_SOURCES = re.compile(r"data\.sources\.\d+\.(weight|path)")
"""The same, of each source. What its path leads to has to be the same as before, which checkpoints tell."""


class RunDirectory:
    """Paths inside the folder, and the lock that keeps a second process out of it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.tokenizer = self.path / "tokenizer.json"
        self.end_of_document = self.path / "end_of_document.txt"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"
        self.loss_plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Makes the folder and keeps other processes out until this one ends.

        Raises:
            UserError: the folder cannot be written, or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held until the process ends
        except OSError as error:
            raise UserError(
                f"run.dir {self.path}: cannot write there ({error.strerror}); choose a folder that you may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"run.dir {self.path}: another process is training in it; wait for it, or choose another run.dir"
            ) from error

    def release(self) -> None:
        """Lets other processes in, and this one once more."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_in_use(self) -> bool:
        """Whether a process trains in the folder."""
        try:
            with open(self.path / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def move_away(self) -> Path | None:
        """Renames an existing folder so that a new run can take its name; tells the new name.

        Raises:
            UserError: it is the working folder, or holds it.
        """
        if not self.path.exists():
            return None
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(
                f"run.dir {self.path}: --fresh cannot rename it, for this command was started in it; start it in "
                "another folder, or choose another run.dir"
            )
        stamp = time.strftime("%Y%m%d-%H%M%S")
        # A path that ends in `..` cannot be renamed as such.
        place = Path(os.path.normpath(self.path))
        target = place.with_name(f"{place.name}.before-{stamp}")
        count = 1
        while target.exists():
            count += 1
            target = place.with_name(f"{place.name}.before-{stamp}-{count}")
        self.acquire()
        place.rename(target)
        self.release()
        return target

    def refuse_other_config(self, config: Config) -> None:
        """Raises UserError if the run in this folder began with a config that this one may not follow."""
        if not self.config.is_file():
            if self.checkpoints.is_dir() and any(child.name.isdecimal() for child in self.checkpoints.iterdir()):
                raise UserError(
                    f"run.dir {self.path} has checkpoints but no config.yaml; put it back (the meta of each checkpoint "
                    "holds it), choose another run.dir, or start over with --fresh"
                )
            return
        try:
            kept = load_config(self.config, option=None)
        except UserError as error:
            raise UserError(
                f"run.dir {self.path}: its config.yaml does not load, is it of another version? ({error}); choose "
                "another run.dir, or start over with --fresh"
            ) from error
        before, now = (flat_config(c) for c in (kept, config))
        changes = [
            f"  {key}: {before.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
            and not key.startswith(CHANGEABLE)
            and not CHANGEABLE_OF_SOURCES.fullmatch(key)
        ]
        if changes:
            raise UserError(
                f"run.dir {self.path} holds a run with another config; put these back, choose another run.dir, or "
                "start over with --fresh:\n" + "\n".join(changes)
            )


class KeepFilesHook(Hook):
    """Writes files of the run directory at the start, once the hooks before it have found nothing wrong."""

    def __init__(self, files: dict[Path, str]) -> None:
        self._files = files

    def on_start(self, context: Context) -> None:
        for path, text in self._files.items():
            write_whole(path, text)
