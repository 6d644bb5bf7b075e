"""Scripts import libraries, never the other way round."""

import ast

from conftest import ROOT


def imported(file) -> set[str]:
    """The first parts of the names of all modules that a file imports, also inside its functions."""
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def test_libraries_import_no_script():
    flat = sorted(ROOT.glob("*.py"))
    packages = [file for start in ROOT.glob("*/__init__.py") for file in start.parent.rglob("*.py")]
    scripts = [file for file in flat if file.stem.startswith("benchmark_") or "__main__" in file.read_text("utf-8")]
    names = {file.stem for file in scripts} | {"tools", "tests", "conftest"}
    libraries = [file for file in flat if file not in scripts] + packages
    found = {file.relative_to(ROOT).as_posix() for file in libraries}
    assert {"infer", "infer_speculative", "benchmark_common", "lessons"} <= names
    assert {"sampling.py", "cache.py", "model.py", "native/step.py"} <= found
    wrong = {file.relative_to(ROOT).as_posix(): sorted(imported(file) & names) for file in libraries}
    assert {name: scripts for name, scripts in wrong.items() if scripts} == {}
