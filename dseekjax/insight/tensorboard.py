"""Records as TensorBoard events."""

import time
from pathlib import Path

from dseekjax.training.hooks import Record


class TensorBoardWriter:
    """Writes every number of a record as a scalar under its name.

    Below tensorboardX's SummaryWriter, which has a thread of its own that dies silently on a full disk.
    """

    def __init__(self, directory: Path) -> None:
        # The library takes a path that begins with s3: for a bucket.
        self._directory = directory.absolute()

    def start(self, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(self._directory / "events"))
        # Makes TensorBoard forget what an earlier start of the run wrote of later steps.
        begin = Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._file.write_event(begin)

    def write(self, record: Record) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if value is not None and name != "step"
        ]
        event = Event(wall_time=time.time(), step=int(record["step"] or 0), summary=Summary(value=values))
        self._file.write_event(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
