"""Import this first in a script: what a user can put right then ends it without a traceback.

Ctrl-C ends the script while it imports torch, and a package that is not installed is named. The
one module that acts when it is imported: `command_line.run_script` takes Ctrl-C over.

It also limits how long OpenMP's threads spin, which libgomp reads when torch loads it.
"""

import os
import re
import signal
import sys
from pathlib import Path


def name_missing(exception_type, error, traceback) -> None:
    """Report a package that is not installed in one line, with exit code 2.

    Any other exception is shown as it is without this. A hook for `sys.excepthook`.
    """
    root = Path(__file__).parents[1]
    name = (getattr(error, "name", None) or "").partition(".")[0]
    ours = (root / name).exists() or (root / f"{name}.py").exists()
    if exception_type is not ModuleNotFoundError or ours or name in sys.stdlib_module_names:
        sys.__excepthook__(exception_type, error, traceback)
        return
    for_tests = (root / "requirements-test.txt").read_text("utf-8")
    target = "make test" if re.search(f"^{re.escape(name)}==", for_tests, re.MULTILINE) else "make"
    spec = sys.modules["__main__"].__spec__  # of what `python -m` runs
    script = f"-m {spec.name}" if spec else sys.argv[0]
    missing = f"{name} is not installed for {sys.executable}"
    words = f"{missing}; run {target}, then: .venv/bin/python {script}"
    print(f"{Path(sys.argv[0]).name}: error: {words}", file=sys.stderr)
    sys.exit(2)


if sys.version_info < (3, 11):  # noqa: UP036, an older one runs this file
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"error: Python 3.11 to 3.14 is needed; this is {version}", file=sys.stderr)
    sys.exit(2)
# At a barrier libgomp spins 300,000 times before it sleeps, milliseconds that other processes want.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = name_missing
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
