"""The public names: all there, sorted, and loaded only when they are used."""

import subprocess
import sys

import pytest

import gpulayer


def test_all_is_sorted() -> None:
    assert list(gpulayer.__all__) == sorted(gpulayer.__all__)


@pytest.mark.parametrize("name", gpulayer.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(gpulayer, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gpulayer.no_such_name


@pytest.mark.parametrize("statement", ["import gpulayer", "import gpulayer.cli; gpulayer.cli.make_parser()"])
def test_import_loads_neither_torch_nor_zmq(statement: str) -> None:
    code = f"import sys; {statement}; print(sorted({{'torch', 'zmq', 'rich', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_agent_loads_no_torch() -> None:
    code = "import sys, gpulayer.agent.agent; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
