"""The import graph of the packages: no file imports itself through others."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import ridgeline

ROOT = Path(ridgeline.__file__).parent


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the project that it imports, in functions and for type checks too."""
    packages = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
    files = {_module(file): file for package in packages for file in package.resolve().rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                inner = members & files.keys()
                found |= inner | ({node.module} if inner != members else set())
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & files.keys()) - {name}
    return graph


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT.resolve().parent).with_suffix("").parts
    return ".".join(("ridgeline", *(part for part in parts if part != "__init__")))


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_file_imports_itself_through_others() -> None:
    graph = import_graph()
    assert len(graph) > 200 and sum(len(imported) for imported in graph.values()) > 500
    assert cycles(graph) == []


def test_a_planted_cycle_is_found() -> None:
    assert cycles(defaultdict(set, {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c"]]


def test_every_import_of_the_project_resolves() -> None:
    """mypy is told to ignore missing modules, also those of this project, inside functions too."""
    missing = []
    top = ROOT.parent
    for folder in (*(path.parent.resolve() for path in ROOT.glob("*/__init__.py")), top / "tests", top / "benchmarks"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ("ridgeline", "tests"):
                    continue
                names = _defined(top, node.module or "")
                missing += [f"{file.relative_to(top)}:{node.lineno}: {node.module}.{a.name}" for a in node.names if a.name not in names]
    assert not missing, "\n".join(missing)


@functools.cache
def _defined(top: Path, module: str) -> frozenset[str]:
    """Names that can be imported from a module: what it defines or imports, and its submodules."""
    place = top.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names = {path.stem for path in place.iterdir() if path.suffix == ".py" or path.is_dir()} if place.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return frozenset(names)


def test_threads_of_a_run_print_whole_lines() -> None:
    """print() writes the newline apart where Python is unbuffered, as under many job scripts: the line of another thread comes between."""
    apart = []
    for package in ("launch", "loaders", "observe", "rundir", "trainer"):
        for file in (ROOT / package).resolve().rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    if "file" in given and given.get("end") != "''":
                        apart.append(f"{file.relative_to(ROOT.parent)}:{node.lineno}")
    assert apart == []
