from __future__ import annotations

import csv

import pytest

from gpulayer.errors import UsageError
from gpulayer.train.loggers import CSVLogger, RelayLogger, as_loggers


def rows(logger):
    with open(logger.log_dir + "/metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_logger_writes_a_row_a_call_and_adds_columns(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"epoch": 0, "a": 1.5}, step=1)
    logger.log_metrics({"epoch": 0, "b": 2.5}, step=2)
    logger.log_metrics({"epoch": 1, "a": 3.5}, step=3)
    assert rows(logger) == [
        {"epoch": "0", "step": "1", "a": "1.5", "b": ""},
        {"epoch": "0", "step": "2", "a": "", "b": "2.5"},
        {"epoch": "1", "step": "3", "a": "3.5", "b": ""},
    ]


def test_csv_logger_takes_the_first_free_version(tmp_path):
    assert [CSVLogger(tmp_path).version for _ in range(2)] != [0, 0]
    assert CSVLogger(tmp_path).log_dir == str(tmp_path / "gpulayer_logs" / "version_2")
    assert CSVLogger(tmp_path, "x", "mine").log_dir == str(tmp_path / "x" / "mine")


def test_csv_logger_goes_on_in_a_version_that_is_there(tmp_path):
    for step in (1, 2):
        CSVLogger(tmp_path, version=0).log_metrics({"a": step}, step=step)
    assert [row["step"] for row in rows(CSVLogger(tmp_path, version=0))] == ["1", "2"]


def test_as_loggers_reads_every_form(tmp_path):
    own = CSVLogger(tmp_path)
    assert [type(each) for each in as_loggers(None, str(tmp_path))] == [CSVLogger]
    assert as_loggers(False, "") == []
    assert as_loggers(own, "") == as_loggers([own], "") == [own]
    with pytest.raises(UsageError, match="no log_metrics"):
        as_loggers("csv", "")


def test_relay_logger_sends_rows():
    sent = []
    RelayLogger(None, lambda row, step: sent.append((row, step))).log_metrics({"a": 1}, 3)
    assert sent == [({"a": 1.0}, 3)]
