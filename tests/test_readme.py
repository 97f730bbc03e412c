"""The README tells the truth: its programs run and print what it shows, its commands exist."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.cli import make_parser

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["trainer", "functions"])
def test_program_prints_what_the_readme_shows(
    program: str, output: str, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_there_are_programs_to_run() -> None:
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^gpulayer .*?(?=\s{2,}#|$)", README, re.MULTILINE))))
def test_command_parses(line: str) -> None:
    words = [word.strip("'") for word in line.split()[1:]]
    make_parser().parse_args(words)


def test_length_and_first_words() -> None:
    assert 140 <= len(README.splitlines()) <= 200
    assert "Train PyTorch on every GPU you can reach" in README.splitlines()[2]


def test_file_links_exist() -> None:
    root = Path(__file__).resolve().parents[1]
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target


def test_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "gpulayer.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gpulayer 0.")


def test_figures_are_those_of_the_recorded_run() -> None:
    (record,) = (Path(__file__).resolve().parents[1] / "bench" / "results").glob("rpc_*.json")
    for row in json.loads(record.read_text())["figures"].values():
        digits = 2 if row["unit"] == "s" else 0
        for side in ("gpulayer", "floor"):
            if side in row:
                assert f"{row[side]['median']:.{digits}f} ({row[side]['min']:.{digits}f}-{row[side]['max']:.{digits}f})" in README
