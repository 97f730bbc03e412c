from __future__ import annotations

import contextlib
import io
import logging

import pytest

from gpulayer.train.events import CheckpointDropped, CheckpointReady, EpochEnded, MetricsLogged, NanLoss, Progress, Started
from gpulayer.train.progress import BarDisplay, LineDisplay, NoDisplay, open_display
from gpulayer.train.reporter import Reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


RUN = [
    Started(3, -1, 10, 1),
    Progress(0, 5, 5, {"train_loss": 0.5}, 100.0),
    EpochEnded(0, 46, {"train_loss": 0.4123, "val_accuracy": 0.912, "tiny": 0.00012}, 1520.2),
]


def test_without_a_terminal_there_is_one_plain_line_an_epoch():
    stream = io.StringIO()
    with Reporter(open_display(True, stream), []) as reporter:
        for event in RUN:
            reporter.handle(event)
    assert stream.getvalue() == "epoch 1/3  step 46  train_loss 0.412  val_accuracy 0.912  tiny 0.00012  1520 samples/s\n"


def test_a_terminal_gets_a_bar_and_its_cursor_back():
    stream = Terminal()
    with contextlib.suppress(KeyboardInterrupt), Reporter(open_display(True, stream), []) as reporter:
        for event in RUN:
            reporter.handle(event)
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert "train_loss 0.500" in shown
    assert "epoch 1/3  step 46" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_display_is_chosen_by_the_stream():
    assert type(open_display(True, Terminal())) is BarDisplay
    assert type(open_display(True, io.StringIO())) is LineDisplay
    assert type(open_display(False, Terminal())) is NoDisplay


def test_reporter_writes_rows_files_and_one_nan_line(tmp_path, caplog):
    class Rows:
        def __init__(self):
            self.rows, self.status = [], None

        def log_metrics(self, metrics, step=None):
            self.rows.append((step, metrics))

        def finalize(self, status):
            self.status = status

    rows, path = Rows(), str(tmp_path / "a.ckpt")
    with caplog.at_level(logging.WARNING), Reporter(NoDisplay(), [rows]) as reporter:
        reporter.handle(MetricsLogged(3, {"a": 1.0}))
        reporter.handle(CheckpointReady(path, {"n": 1}))
        assert (tmp_path / "a.ckpt").exists()
        for _ in range(2):
            reporter.handle(CheckpointDropped(path))
            reporter.handle(NanLoss(4, 1))
    assert (rows.rows, rows.status) == ([(3, {"a": 1.0})], "success")
    assert not list(tmp_path.iterdir())
    assert len(caplog.records) == 1


def test_reporter_publishes_at_most_twice_a_second():
    told = []
    reporter = Reporter(NoDisplay(), [])
    reporter.publish_to(told.append)
    for event in [RUN[0], *[RUN[1]] * 50]:
        reporter.handle(event)
    assert [status["state"] for status in told] == ["starting", "running"]
    assert told[-1]["max_steps"] == 30


@pytest.mark.parametrize(("error", "state"), [(None, "finished"), (KeyboardInterrupt, "failed")])
def test_reporter_publishes_how_the_run_ended(error, state):
    told = []
    with pytest.raises(KeyboardInterrupt) if error else contextlib.nullcontext(), Reporter(NoDisplay(), []) as reporter:
        reporter.publish_to(told.append)
        if error:
            raise error
    assert told[-1]["state"] == state
