"""Reads the package's source for calls that could run what a stranger sends, and names where they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NOWHERE: tuple[str, ...] = ()
SERIALIZE = ("gpulayer/wire/serialize.py",)

# full name of what is used -> the files (or folders, with a final slash) that may use it
ALLOWED = {
    "zmq.Context": ("gpulayer/wire/context.py",),
    "zmq.SyncContext": NOWHERE,
    "zmq.Context.instance": NOWHERE,
    "zmq.asyncio": NOWHERE,
    "zmq.green": NOWHERE,
    "zmq.auth": NOWHERE,
    "pickle.load": NOWHERE,
    "pickle.loads": SERIALIZE,
    "pickle.Unpickler": SERIALIZE,
    "cloudpickle.load": NOWHERE,
    "cloudpickle.loads": SERIALIZE,
    "gpulayer.wire.serialize.loads": ("gpulayer/runtime/", *SERIALIZE),
    "marshal.load": NOWHERE,
    "marshal.loads": NOWHERE,
    "shelve.open": NOWHERE,
    "dill.loads": NOWHERE,
    "yaml.load": NOWHERE,
    "os.system": NOWHERE,
    "os.popen": NOWHERE,
    "subprocess.getoutput": NOWHERE,
    "subprocess.getstatusoutput": NOWHERE,
    "asyncio.create_subprocess_shell": NOWHERE,
    "tempfile.mktemp": NOWHERE,
    "eval": NOWHERE,
    "exec": ("gpulayer/runtime/modules.py",),
    "compile": ("gpulayer/runtime/modules.py",),
}
PYOBJ_METHODS = ("recv_pyobj", "send_pyobj", "recv_serialized")
BANNED_MODULES = ("zmq.asyncio", "zmq.green", "zmq.auth")
MAKES_SOCKETS = ("gpulayer/wire/security.py", "gpulayer/wire/authenticator.py")


def full_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: `from pickle import loads as l` gives l -> pickle.loads."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of `a.b.c`, "" for what is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def type_hints(tree: ast.Module) -> set[int]:
    """The nodes that may say a type: annotations, and what stands in square brackets."""
    found: set[int] = set()
    for node in ast.walk(tree):
        hints = [
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            node if isinstance(node, ast.Subscript) else None,
        ]
        found.update(id(child) for hint in hints if hint is not None for child in ast.walk(hint))
    return found


def uses(node: ast.AST, names: dict[str, str], hints: set[int]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(what is used, where that is allowed) for each thing in this one node that is allowed in some places only."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (module + alias.name for alias in node.names):
            if name.startswith(BANNED_MODULES):
                yield name, NOWHERE
    if isinstance(node, ast.Name | ast.Attribute):
        name = dotted(node, names)
        if name in ALLOWED and not (name == "zmq.Context" and id(node) in hints):
            yield name, ALLOWED[name]
    if isinstance(node, ast.Attribute) and node.attr in PYOBJ_METHODS:
        yield node.attr, NOWHERE
    if isinstance(node, ast.Call):
        yield from uses_of_call(node, dotted(node.func, names))


def uses_of_call(node: ast.Call, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield "shell=True", NOWHERE
    weights_only = keywords.get("weights_only")
    if name == "torch.load" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
        yield "torch.load without weights_only=True", NOWHERE
    if isinstance(node.func, ast.Attribute) and node.func.attr == "socket" and name != "socket.socket":
        yield ".socket(", MAKES_SOCKETS


def findings(source: str, path: str) -> list[str]:
    """`path:line: what` for each use in a place where it is not allowed."""
    tree = ast.parse(source)
    names, hints = full_names(tree), type_hints(tree)
    return [
        f"{path}:{node.lineno}: {what}"
        for node in ast.walk(tree)
        for what, where in uses(node, names, hints)
        if not path.startswith(where or ("nowhere",))
    ]


def test_security_scan_finds_nothing():
    files = sorted([*(ROOT / "gpulayer").rglob("*.py"), *(ROOT / "gpulayer_native").rglob("*.py")])
    assert len(files) > 5
    assert [line for file in files for line in findings(file.read_text(), file.relative_to(ROOT).as_posix())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import zmq\nzmq.Context()",
        "import zmq as z\nz.Context(1)",
        "from zmq import Context\nContext()",
        "from zmq import Context as C\nmake = C",
        "import zmq\nzmq.Context.instance()",
        "import zmq.asyncio",
        "import zmq.asyncio as za",
        "from zmq import asyncio",
        "from zmq.asyncio import Context",
        "import zmq\nzmq.asyncio.Context()",
        "context().socket(5)",
        "s.recv_pyobj()",
        "s.send_pyobj(1)",
        "f = s.recv_pyobj",
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads\nloads(b'')",
        "def f():\n    from pickle import loads as l\n    l(b'')",
        "import pickle\nclass U(pickle.Unpickler): pass",
        "import pickle\nm = map(pickle.loads, [])",
        "import cloudpickle\ncloudpickle.loads(b'')",
        "from gpulayer.wire import serialize\nserialize.loads([])",
        "from gpulayer.wire.serialize import loads\nloads([])",
        "import marshal\nmarshal.loads(b'')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "run('ls', shell=flag)",
        "import os\nos.system('ls')",
        "eval('1')",
        "d[eval('1')]",
        "exec('1')",
        "compile('1', '', 'exec')",
        "import torch\ntorch.load('f')",
        "import torch\ntorch.load('f', weights_only=False)",
        "from torch import load\nload('f')",
        "import yaml\nyaml.load('')",
    ],
)
def test_security_scan_finds_what_it_is_for(source):
    assert findings(source, "gpulayer/agent/agent.py")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("import zmq\nfound = zmq.Context(io_threads=2)", "gpulayer/wire/context.py"),
        ("import zmq\ndef f(c: zmq.Context) -> zmq.Context[int]: ...", "gpulayer/agent/agent.py"),
        ("import zmq\nc: zmq.Context | None = None\nd: dict[int, zmq.Context] = {}", "gpulayer/agent/agent.py"),
        ("import pickle\npickle.dumps(1)", "gpulayer/agent/agent.py"),
        ("import pickle, cloudpickle\npickle.loads(b'')\ncloudpickle.loads(b'')", "gpulayer/wire/serialize.py"),
        ("from gpulayer.wire import serialize\nserialize.loads([])", "gpulayer/runtime/worker.py"),
        ("exec(compile('1', '', 'exec'))", "gpulayer/runtime/modules.py"),
        ("import re\nre.compile('x')", "gpulayer/agent/agent.py"),
        ("import torch\ntorch.load('f', weights_only=True)", "gpulayer/train/checkpoint.py"),
        ("import json\njson.loads('1')", "gpulayer/agent/agent.py"),
        ("import socket\nsocket.socket()", "gpulayer/agent/agent.py"),
        ("import subprocess\nsubprocess.run(['ls'], shell=False)", "gpulayer/agent/agent.py"),
        ("model.eval()\nmodel.exec()", "gpulayer/train/loop.py"),
    ],
)
def test_security_scan_lets_pass_what_is_allowed(source, path):
    assert findings(source, path) == []
