"""The structure holds: imports point down, there are no cycles, files and functions stay within their budgets."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gpulayer"
LAYERS = [
    {"errors", "resources", "config"},
    {"wire"},
    {"scheduler"},
    {"jobs"},
    {"runtime"},
    {"agent"},
    {"train", "callbacks", "loggers"},  # the last two are Lightning's spelling of what lies in train
    {"cli"},
]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
WIRE_ONLY = {"zmq", "msgpack", "cloudpickle"}
FILES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "gpulayer_native").rglob("*.py")])


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def layer_of(module: str) -> int | None:
    """The layer's number; None for the package itself, which only names things."""
    parts = module.split(".")
    if parts[0] != "gpulayer" or len(parts) == 1:
        return None
    return next(number for number, names in enumerate(LAYERS) if parts[1] in names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Modules that a file imports when it runs (imports for type checkers left out)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if is_type_checking(node) or (top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if is_module(full) else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_never_point_up(path: Path) -> None:
    mine = layer_of(module_name(path))
    if mine is None:
        return
    for name in imports(path):
        theirs = layer_of(name)
        assert theirs is None or theirs <= mine, f"{module_name(path)} imports {name}, which lies above it"


def test_modules_have_no_cycles() -> None:
    graph = {module_name(path): {n for n in imports(path) if n.startswith("gpulayer.")} for path in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file_keeps_its_budgets(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_the_wire_imports_its_libraries(path: Path) -> None:
    if layer_of(module_name(path)) == 1:
        return
    wrong = {name.split(".")[0] for name in imports(path)} & WIRE_ONLY
    assert wrong == set()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_train_imports_torch_at_module_level(path: Path) -> None:
    name = module_name(path)
    if name.startswith(("gpulayer.train", "gpulayer_native")):
        return
    assert "torch" not in {imported.split(".")[0] for imported in imports(path, top_level=True)}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_public_things_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            overload = any("overload" in ast.dump(decorator) for decorator in node.decorator_list)
            assert overload or ast.get_docstring(node), f"{node.name} has no docstring"
