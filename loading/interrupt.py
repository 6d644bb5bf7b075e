"""Startup hooks without tracebacks: import this module first in a script.

Ctrl-C ends the script while it imports torch, and a missing package is reported by name. Only this
module acts on import. `command_line.run_script` takes over Ctrl-C later.

It also limits the spin time of OpenMP threads, which libgomp reads when torch loads it.
"""

import os
import signal
import sys
from pathlib import Path


def name_missing(exception_type, error, traceback) -> None:
    """Report a missing package in one line, and exit with code 2.

    Any other exception is printed as usual. A hook for `sys.excepthook`.
    """
    root = Path(__file__).parents[1]
    name = (getattr(error, "name", None) or "").partition(".")[0]
    ours = (root / name).exists() or (root / f"{name}.py").exists()
    if exception_type is not ModuleNotFoundError or ours or name in sys.stdlib_module_names:
        sys.__excepthook__(exception_type, error, traceback)
        return
    project = (root / "pyproject.toml").read_text("utf-8")
    for_tests = project.partition("[project.optional-dependencies]")[2]
    target = "make test" if f'"{name}==' in for_tests else "make"
    spec = sys.modules["__main__"].__spec__  # the module that `python -m` runs
    script = f"-m {spec.name}" if spec else sys.argv[0]
    missing = f"{name} is not installed for {sys.executable}"
    words = f"{missing}; run {target}, then: .venv/bin/python {script}"
    print(f"{Path(sys.argv[0]).name}: error: {words}", file=sys.stderr)
    sys.exit(2)


if sys.version_info < (3, 11):  # noqa: UP036, an older one runs this file
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"error: Python 3.11 to 3.14 is needed; this is {version}", file=sys.stderr)
    sys.exit(2)
# At a barrier libgomp spins 300,000 times before it sleeps, which takes milliseconds of CPU time
# from other processes.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = name_missing
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a parent may ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_DFL)
