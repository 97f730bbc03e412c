"""Each example runs as its docstring says, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run_example(name, folder, timeout_s):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in {text!r}"
    return float(found.group(1))


def test_digits_reach_97_percent_over_two_hosts_within_a_minute(tmp_path):
    said = run_example("digits.py", tmp_path, 60)
    assert "host local-1: " in said
    assert "host local-2: " in said
    assert "trained on 2 workers: 230 steps" in said
    assert number(r"test accuracy ([\d.]+)%", said) >= 97.0


def test_functions_show_tasks_actors_and_errors(tmp_path):
    said = run_example("functions.py", tmp_path, 60)
    assert "primes below 20000: 2262" in said
    assert "now 101" in said
    assert "counter says 121" in said
    assert "another process: True" in said
    assert "found by name: 421" in said
    assert "errors keep their type: " in said


def test_gpt_learns_from_the_standard_library(tmp_path):
    said = run_example("stdlib_gpt.py", tmp_path, 150)
    assert number(r"loss ([\d.]+)", said) < number(r"\(\w+: ([\d.]+)\)", said) - 1.5


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60
