"""The user's own modules, shipped: a worker whose folder is empty imports what only the driver's folder has.

A worker asks the process that called it for a module that it cannot find itself (`Finder`, at the end of `sys.meta_path`);
that process answers with the source, if the module is the user's own (`answer`), or with the package to install, if it
is not. Each module is asked for once per worker.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import linecache
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gpulayer.errors import MissingModuleError

Ask = Callable[[str], "tuple[dict[str, Any], bytes] | None"]
"""Module name -> (what kind it is, its source), or None when nobody can be asked."""


class Finder(MetaPathFinder):
    """Finds modules by asking the caller."""

    def __init__(self, ask: Ask, host: str) -> None:
        self._ask = ask
        self._host = host
        self._unknown: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec whose source came from the caller. Raises `MissingModuleError` for a package that only the caller has."""
        parent = fullname.rpartition(".")[0]
        if fullname in self._unknown or (parent and not _is_shipped(parent)):
            return None
        found = self._ask(fullname)
        kind = found[0]["kind"] if found else "unknown"
        if found is None or kind == "unknown":
            self._unknown.add(fullname)
            return None
        body, source = found
        if kind == "installed":
            raise MissingModuleError(module=fullname, package=body["package"], host=self._host)
        if kind == "namespace":
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [f"gpulayer:{fullname}"]
            return spec
        loader = ShippedLoader(source.decode(), str(body["filename"]))
        spec = ModuleSpec(fullname, loader, origin=loader.filename, is_package=bool(body["is_package"]))
        spec.has_location = True
        return spec


class ShippedLoader(InspectLoader):
    """Loads a module from source that came over the wire; tracebacks show its lines."""

    def __init__(self, source: str, filename: str) -> None:
        self.source = source
        self.filename = filename

    def get_source(self, fullname: str) -> str:
        """The module's source."""
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        """The module's code."""
        return compile(self.source, self.filename, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, so that its names exist."""
        linecache.cache[self.filename] = (len(self.source), None, self.source.splitlines(keepends=True), self.filename)
        super().exec_module(module)


def _is_shipped(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return False
    locations = list(spec.submodule_search_locations or ())
    return isinstance(spec.loader, ShippedLoader) or any(str(one).startswith("gpulayer:") for one in locations)


def answer(name: str) -> tuple[dict[str, Any], list[bytes]]:
    """What this process knows of module `name`: its source if it is the user's own, or which package has it."""
    spec = _find(name)
    if spec is None or name == "__main__":
        return {"kind": "unknown"}, []
    if isinstance(spec.loader, ShippedLoader):
        found = spec.loader
        return {"kind": "source", "filename": found.filename, "is_package": _is_package(spec)}, [found.source.encode()]
    if spec.origin in (None, "namespace"):
        return ({"kind": "namespace"} if spec.submodule_search_locations else {"kind": "unknown"}), []
    origin = Path(spec.origin)
    if spec.origin in ("built-in", "frozen") or not is_own(origin):
        return {"kind": "installed", "package": _package_of(name)}, []
    if origin.suffix != ".py":
        return {"kind": "installed", "package": f"(the compiled module {origin.name}, which cannot be shipped)"}, []
    source = importlib.util.decode_source(origin.read_bytes()).encode()
    return {"kind": "source", "filename": str(origin), "is_package": _is_package(spec)}, [source]


def is_own(path: Path) -> bool:
    """Whether a module's file is the user's own: not the standard library's, not in a site-packages folder."""
    resolved = str(path.resolve())
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    stdlib = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib")]
    return not any(folder and resolved.startswith(str(Path(folder).resolve()) + "/") for folder in stdlib)


def _find(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is not None:
        spec = getattr(module, "__spec__", None)
        if spec is not None:
            return spec
        path = getattr(module, "__file__", None)
        return importlib.util.spec_from_file_location(name, path) if path else None
    parent = name.rpartition(".")[0]
    search: Any = None
    if parent:  # never import a parent just to look: that would run user code in the IO thread
        if parent not in sys.modules:
            return None
        search = getattr(sys.modules[parent], "__path__", None)
    return importlib.machinery.PathFinder.find_spec(name, search)


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None


def _package_of(name: str) -> str:
    top = name.partition(".")[0]
    found = importlib.metadata.packages_distributions()
    package = found.get(top, [top])[0]
    try:
        return f"{package}=={importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
