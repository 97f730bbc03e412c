"""The benchmark programs run and write what bench/README.md promises; their figures are nobody's pass or fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_rpc_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "rpc.json"
    command = [sys.executable, str(ROOT / "bench" / "rpc.py"), "--rounds", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert set(record["figures"]) == {"first result", "sync", "pipelined", "echo 1 MiB", "echo 100 MiB"}
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(row["gpulayer"]["median"] > 0 for row in record["figures"].values())
