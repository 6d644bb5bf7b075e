"""Processes of tests."""

import os
import time
from pathlib import Path


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(int(pid), 0)
        about = Path("/proc", pid.strip(), "stat")
        return not Path("/proc").exists() or " Z " not in about.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
