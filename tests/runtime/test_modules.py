from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gpulayer
from gpulayer.errors import MissingModuleError
from gpulayer.runtime import modules

ROOT = Path(__file__).resolve().parents[2]


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of the user's own with modules, importable here."""
    write(
        tmp_path,
        {
            "own_single.py": "VALUE = 'single'\n",
            "own_package/__init__.py": "from own_package.inner import deep\nNAME = __name__\n",
            "own_package/inner.py": "def deep():\n    return 'deep'\n",
            "own_namespace/part.py": "def here():\n    return __file__\n",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_answer_has_the_source_of_an_own_module(project):
    body, frames = modules.answer("own_single")
    assert body == {"kind": "source", "filename": str(project / "own_single.py"), "is_package": False}
    assert frames == [b"VALUE = 'single'\n"]


def test_answer_knows_packages_and_namespaces(project):
    import own_namespace.part
    import own_package

    assert modules.answer("own_package")[0]["is_package"] is True
    assert modules.answer("own_package.inner")[0]["is_package"] is False
    assert modules.answer("own_namespace")[0] == {"kind": "namespace"}
    assert modules.answer("own_namespace.part")[0]["kind"] == "source"
    assert own_package.NAME
    assert own_namespace.part.here()


@pytest.mark.parametrize("name", ["__main__", "no_such_module", "own_package_missing.sub"])
def test_answer_does_not_know_what_is_not_there(name):
    assert modules.answer(name) == ({"kind": "unknown"}, [])


def test_answer_names_the_package_of_what_is_installed():
    import numpy

    body, frames = modules.answer("numpy")
    assert body == {"kind": "installed", "package": f"numpy=={numpy.__version__}"}
    assert frames == []
    assert modules.answer("sklearn")[0]["package"].startswith("scikit-learn==")


def test_answer_runs_no_code_of_a_module_that_is_not_imported(project):
    write(project, {"own_loud.py": "raise SystemExit\n"})
    assert modules.answer("own_loud")[0]["kind"] == "source"


def test_standard_library_is_not_the_users_own():
    assert not modules.is_own(Path(json.__file__))
    assert not modules.is_own(Path("/x/lib/python3.11/site-packages/thing.py"))
    assert modules.is_own(Path("/home/me/project/thing.py"))


def test_finder_imports_what_it_was_answered(project):
    import own_package

    assert own_package
    answers = {name: modules.answer(name) for name in ("own_package", "own_package.inner")}
    for name in answers:
        del sys.modules[name]
    sys.path.remove(str(project))
    asked = []

    def ask(name):
        asked.append(name)
        body, frames = answers.get(name, ({"kind": "unknown"}, []))
        return body, frames[0] if frames else b""

    finder = modules.Finder(ask, "far-host")
    sys.meta_path.append(finder)
    try:
        import own_package as arrived

        assert arrived.deep() == "deep"
        assert modules.answer("own_package.inner")[1] == answers["own_package.inner"][1]  # it can be passed on
        with pytest.raises(ModuleNotFoundError):
            import own_missing
        with pytest.raises(ModuleNotFoundError):
            import own_missing  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
        sys.path.insert(0, str(project))
    assert asked == ["own_package", "own_package.inner", "own_missing"]


def test_finder_names_package_host_and_command_of_what_is_not_installed():
    finder = modules.Finder(lambda name: ({"kind": "installed", "package": "thing==1.2"}, b""), "far-host")
    with pytest.raises(MissingModuleError, match=r"'thing' is not installed on host 'far-host'.*pip install thing==1\.2"):
        finder.find_spec("thing", None)


# --- with a driver in one folder and a worker whose folder is empty


def test_own_modules_arrive_in_a_worker_whose_folder_is_empty(start_agent, tmp_path):
    _, ready = start_agent("--port", "0", "--name", "far", PYTHONPATH=str(ROOT))
    folder = tmp_path / "A"
    write(
        folder,
        {
            "script.py": f"""
                import gpulayer
                import helper
                from pack.sub import inner
                from space.part import Thing

                gpulayer.connect(["127.0.0.1:{ready["port"]}"])

                class Local:
                    def __init__(self, x):
                        self.x = x
                    def double(self):
                        return Local(self.x * 2)

                @gpulayer.remote
                def work(thing, local):
                    import os
                    import pack.late
                    assert os.listdir() == [], os.listdir()
                    return helper.twice(3), inner.name(), pack.late.VALUE, Thing(thing.x + 1), local.double()

                single, name, late, thing, local = gpulayer.get(work.remote(Thing(1), Local(4)))
                assert (single, name, late) == (6, "pack.sub.inner", "late"), (single, name, late)
                assert isinstance(thing, Thing) and thing.x == 2
                assert isinstance(local, Local) and local.x == 8
                try:
                    gpulayer.get(gpulayer.remote(helper.fail).remote())
                except helper.HelperError as error:
                    assert "helper.py" in str(error.__cause__) and "raise HelperError" in str(error.__cause__), error.__cause__
                print("all well")
            """,
            "helper.py": """
                class HelperError(Exception):
                    pass
                def twice(x):
                    return 2 * x
                def fail():
                    raise HelperError("from the helper")
            """,
            "pack/__init__.py": "",
            "pack/late.py": "VALUE = 'late'",
            "pack/sub/__init__.py": "from . import inner",
            "pack/sub/inner.py": "def name():\n    return __name__",
            "space/part.py": "class Thing:\n    def __init__(self, x):\n        self.x = x",
        },
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr


def test_package_that_the_worker_lacks_is_named_with_the_pip_command(run_script, tmp_path):
    site = tmp_path / "lib" / "site-packages"
    write(
        site,
        {
            "fancy_thing/__init__.py": "def f():\n    return 1",
            "fancy_thing-2.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: fancy-thing\nVersion: 2.5\n",
            "fancy_thing-2.5.dist-info/top_level.txt": "fancy_thing\n",
            "fancy_thing-2.5.dist-info/RECORD": "fancy_thing/__init__.py,,\n",
        },
    )
    done = run_script(
        f"""
import sys
import gpulayer
gpulayer.connect()
sys.path.append({str(site)!r})
import fancy_thing
@gpulayer.remote
def use():
    import fancy_thing
for function in (use, gpulayer.remote(fancy_thing.f)):
    try:
        gpulayer.get(function.remote())
    except gpulayer.errors.MissingModuleError as error:
        print(error.module, error.package, "pip install fancy-thing==2.5" in str(error), error.host in str(error))
"""
    )
    assert done.stdout == "fancy_thing fancy-thing==2.5 True True\n" * 2, done.stderr


class Mine:
    """A class of this test module, which only pytest could import."""

    def __init__(self, value):
        self.value = value


def add_one(mine):
    return Mine(mine.value + 1)


def test_functions_and_classes_of_a_test_module_travel(session):
    back = gpulayer.get(gpulayer.remote(add_one).remote(Mine(1)))
    assert isinstance(back, Mine)
    assert back.value == 2
