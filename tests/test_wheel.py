"""What `pip install .` puts on a machine: built without a compiler, without torch, whole."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked sources, so that nothing is written into the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("gpulayer", "gpulayer_native", "pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, env={"PATH": "/nonexistent"})  # no compiler is found
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_is_pure_and_whole(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(ROOT)) for folder in ("gpulayer", "gpulayer_native") for path in (ROOT / folder).rglob("*.py")
    }
    assert sources <= names
    assert "gpulayer/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "bench", "examples"))]


@pytest.mark.slow
def test_wheel_metadata_names_licence_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = archive.read(info).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "gpulayer = gpulayer.cli:main" in entry_points
    assert any(name.endswith("LICENSE") for name in archive.namelist())


@pytest.mark.slow
def test_wheel_imports_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(wheel)],
        check=True,
        capture_output=True,
    )
    code = "import gpulayer, gpulayer.cli; print(gpulayer.__file__); gpulayer.cli.make_parser()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
