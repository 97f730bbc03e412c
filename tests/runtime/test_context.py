from __future__ import annotations

import threading

import pytest

from gpulayer.errors import UsageError
from gpulayer.runtime import context


def test_report_sends_to_the_caller_of_the_running_call():
    sent = []
    context.enter(sent.append)
    context.report({"loss": 1})
    context.leave()
    assert sent == [{"loss": 1}]


def test_report_outside_of_a_call_is_refused():
    with pytest.raises(UsageError, match="inside a remote call"):
        context.report(1)


def test_report_on_another_thread_is_refused():
    errors = []

    def elsewhere():
        try:
            context.report(1)
        except UsageError as error:
            errors.append(error)

    context.enter(lambda value: None)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    context.leave()
    assert len(errors) == 1
