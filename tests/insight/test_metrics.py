"""The metrics file across crashes, and what is made from it."""

import errno
import io
import json
import struct

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dseekjax.errors import UserError
from dseekjax.insight.metrics import MetricsHook, read_records
from dseekjax.insight.report import write_report
from dseekjax.insight.tensorboard import TensorBoardWriter
from dseekjax.insight.terminal import TerminalHook
from dseekjax.training.hooks import Context


def record(step, loss=1.5):
    return {
        "step": step,
        "loss": loss,
        "bad_steps": 0.0,
        "tokens_per_second": 10.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.0,
    }


class Collect:
    def __init__(self, failing=None):
        self.records, self.failing = [], failing

    def start(self, step):
        self.started = step

    def write(self, record):
        if self.failing:
            raise self.failing
        self.records.append(record)

    def flush(self):
        pass

    def close(self):
        pass


def write(path, steps, restored_step=0, writers=()):
    told = []
    hook = MetricsHook(path, writers, told.append)
    hook.on_start(Context(restored_step, 100, {}))
    for step in steps:
        hook.on_record(record(step, 1 / (step + 1)))
    hook.flush()
    hook.close()
    return told


def test_records_come_back_exactly_and_reach_the_writers(tmp_path):
    collect = Collect()
    write(tmp_path / "m.jsonl", range(1, 5), writers=[collect])
    assert [r["loss"] for r in read_records(tmp_path / "m.jsonl")] == [1 / (step + 1) for step in range(1, 5)]
    assert [r["step"] for r in collect.records] == [1, 2, 3, 4]
    assert collect.started == 0


def test_records_after_the_restored_step_and_torn_lines_go(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 8))
    with open(path, "a") as file:
        file.write('{"step": 8, "lo')
    assert write(path, range(6, 9), restored_step=5) == []
    assert [r["step"] for r in read_records(path)] == list(range(1, 9))
    assert all(json.loads(line) for line in path.read_text().splitlines())
    path.unlink()
    assert "lacks the records of 8 of 8 steps" in write(path, [9], restored_step=8)[0]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writer broke")])
def test_what_fails_in_the_thread_is_one_sentence_and_holds_nobody_up(tmp_path, failure):
    hook = MetricsHook(tmp_path / "m.jsonl", [Collect(failing=failure)], print)
    hook.on_start(Context(0, 100, {}))
    hook.on_record(record(1))
    with pytest.raises(UserError, match=r"No space left on device|writer broke"):
        hook.flush()
    with pytest.raises(UserError):
        hook.on_record(record(2))
    hook.close()


def test_tensorboard_gets_every_number_and_forgets_what_is_done_again(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.start(4)
    writer.write(record(5, 0.5) | {"mfu": None})
    writer.close()
    (file,) = (tmp_path / "tb").iterdir()
    _, begin, event = events(file.read_bytes())
    assert begin.step == 5
    assert begin.session_log.status == SessionLog.START
    assert event.step == 5
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert values["loss"] == 0.5
    assert set(values) == set(record(5)) - {"step"}


def events(content):
    """The events of a file: each between its length, that length's checksum and its own."""
    found = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_progress_shows_what_is_not_finite():
    output = io.StringIO()
    hook = TerminalHook(Console(file=output, width=200), every_steps=1)
    hook.on_start(Context(0, 3, {}))
    hook.on_record(record(1, None) | {"eval_loss": None, "eval_bits_per_byte": None})
    hook.close()
    assert "held-out loss not finite" in output.getvalue()
    assert "step 1/3  loss not finite" in output.getvalue()


def test_report_holds_picture_numbers_and_escaped_config(tmp_path):
    records = [record(step, 3.0 / step) for step in range(1, 11)]
    records[4]["loss"] = None
    records[-1] |= {"eval_loss": 0.25, "eval_bits_per_byte": 0.125}
    write_report(
        records,
        title="a <run>",
        summary="s",
        config="x: <y>",
        plot=tmp_path / "loss.png",
        page=tmp_path / "report.html",
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    for text in ("a &lt;run&gt;", "x: &lt;y&gt;", "0.2500", "0.1250", "data:image/png;base64,"):
        assert text in page
