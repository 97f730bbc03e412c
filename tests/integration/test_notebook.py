"""A real kernel: cells that connect, call and await, as a notebook does."""

from __future__ import annotations

import contextlib

import psutil
import pytest

from gpulayer.runtime import records
from tests.conftest import ROOT, wait_until

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # jupyter's own
]


@pytest.fixture
def notebook(own_folders, tmp_path, monkeypatch):
    """Runs a cell in one kernel and returns what it printed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(own_folders / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(own_folders / "jupyter"))
    book = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(book, timeout=40, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})

    def run(source):
        book.cells.append(nbformat.v4.new_code_cell(source))
        cell = client.execute_cell(book.cells[-1], len(book.cells) - 1)
        return "".join(output.get("text", "") for output in cell.outputs)

    with client.setup_kernel():
        run.client = client
        yield run


def kernel_children():
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += ["gpulayer"] if "gpulayer" in " ".join(process.cmdline()) else []
    return found


def test_notebook_connects_calls_awaits_and_leaves_nothing_after_a_restart(notebook, own_folders):
    notebook("import gpulayer; connection = gpulayer.connect()")
    notebook(
        """
class Point:
    def __init__(self, x):
        self.x = x

@gpulayer.remote
def move(point, by=1):
    print("moving")
    return Point(point.x + by)

@gpulayer.remote
class Counter:
    def __init__(self):
        self.n = 0
    def add(self):
        self.n += 1
        return self.n
"""
    )
    assert notebook("p = gpulayer.get(move.remote(Point(1))); print(isinstance(p, Point), p.x)").count("True 2\n") == 1
    # what a cell shows cannot be seen from inside it, so it stays open for a moment
    shown = notebook("import time; gpulayer.get(move.remote(Point(3))); time.sleep(2)")
    assert shown.startswith("(move pid=")  # in the cell that called, not in the one that connected
    assert shown.endswith("moving\n")
    assert "3\n" in notebook("print((await move.remote(Point(2))).x)")
    assert "[1, 2]" in notebook("c = Counter.remote(); import asyncio; print([await c.add.remote(), await c.add.remote()])")
    assert "5 6" in notebook("a, b = await asyncio.gather(move.remote(Point(4)), move.remote(Point(5))); print(a.x, b.x)")
    assert "ValueError" in notebook(
        """
def bad():
    raise ValueError("in a cell")
try:
    await gpulayer.remote(bad).remote()
except ValueError as error:
    print(repr(error), error.__cause__)
"""
    )
    assert notebook("offset = 10\nprint(gpulayer.get(gpulayer.remote(lambda x: x + offset).remote(1)))").strip() == "11"
    assert kernel_children()
    notebook.client.kc.shutdown(restart=True)
    wait_until(lambda: not kernel_children() and not records.read_all(own_folders / "run"), 10, "the end of all workers")
