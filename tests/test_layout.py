"""Scripts import libraries, never the other way round."""

import ast

from conftest import ROOT


def imported(file) -> set[str]:
    """The first parts of the names of all modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def is_script(file) -> bool:
    return file.stem.startswith("benchmark_") or "__main__" in file.read_text("utf-8")


def test_libraries_import_no_script():
    flat = sorted(ROOT.glob("*.py"))
    scripts = {file.stem for file in flat if is_script(file)} | {"tools", "tests", "conftest"}
    libraries = [file for file in flat if not is_script(file)]
    for start in ROOT.glob("*/__init__.py"):
        libraries += start.parent.rglob("*.py")
    wrong = {}
    for file in libraries:
        wrong[file.relative_to(ROOT).as_posix()] = sorted(imported(file) & scripts)
    assert {"infer", "lessons"} <= scripts
    assert {"command_line.py", "errors.py", "load.py", "model.py"} <= wrong.keys()
    assert {"sampling.py", "cache.py", "native/step.py"} <= wrong.keys()
    assert {name: found for name, found in wrong.items() if found} == {}
