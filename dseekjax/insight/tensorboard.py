"""Records as TensorBoard events."""

from pathlib import Path

from dseekjax.training.hooks import Record


class TensorBoardWriter:
    """Writes every number of a record as a scalar under its name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self, step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)

    def write(self, record: Record) -> None:
        step = int(record["step"] or 0)
        for name, value in record.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
