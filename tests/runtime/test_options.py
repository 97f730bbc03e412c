from __future__ import annotations

import pytest

import gpulayer
from gpulayer.errors import UsageError
from gpulayer.resources import Resources
from gpulayer.runtime.options import ACTOR_DEFAULT, TASK_DEFAULT


def test_tasks_need_a_cpu_and_actors_none():
    assert TASK_DEFAULT.need == Resources(cpus=1.0)
    assert ACTOR_DEFAULT.need == Resources(cpus=0.0)


def test_options_replace_only_what_is_given():
    options = TASK_DEFAULT.updated({"num_gpus": 0.5, "host": "gpu1"}, actor=False)
    assert (options.need, options.host) == (Resources(1.0, 0.5), "gpu1")
    assert options.updated({"num_cpus": 3}, actor=False).need == Resources(3.0, 0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_gpu": 1}, "did you mean 'num_gpus'"),
        ({"nonsense": 1}, "Known options: num_cpus, num_gpus, host"),
        ({"name": "x"}, "unknown option 'name'"),
        ({"num_cpus": "two"}, "num_cpus='two' is not a number"),
        ({"num_cpus": True}, "not a number"),
        ({"num_cpus": -1}, "num_cpus=-1"),
        ({"num_gpus": 1.5}, "whole number"),
        ({"num_cpus": float("nan")}, "number"),
        ({"host": 3}, "host=3"),
    ],
)
def test_option_that_cannot_work_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        TASK_DEFAULT.updated(given, actor=False)


def test_actor_options_know_name():
    assert ACTOR_DEFAULT.updated({"name": "counter"}, actor=True).name == "counter"
    with pytest.raises(UsageError, match="did you mean 'name'"):
        ACTOR_DEFAULT.updated({"nam": "counter"}, actor=True)


def test_decorator_refuses_an_unknown_option_at_once():
    with pytest.raises(UsageError, match="did you mean 'num_cpus'"):
        gpulayer.remote(num_cpu=1)
    with pytest.raises(UsageError, match="options by name"):
        gpulayer.remote(print, num_cpus=1)


def test_options_method_refuses_an_unknown_option():
    with pytest.raises(UsageError, match="did you mean 'num_gpus'"):
        gpulayer.remote(print).options(num_gps=1)


@pytest.mark.parametrize("key", ["retries", "max_concurrency", "max_restarts", "zone"])
def test_option_of_the_design_that_is_not_there_yet_says_so(key):
    with pytest.raises(UsageError, match=f"{key}.*not supported yet"):
        gpulayer.remote(**{key: 2})(lambda: None)
