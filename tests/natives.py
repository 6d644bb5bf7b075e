"""Compilers for tests."""

import os
import time
from pathlib import Path


def script(file, *lines) -> str:
    """Write a program that runs these lines of shell, such as a compiler's."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)


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


def to_int8(model):
    """A model in memory with int8 weights, and everything else as it is."""
    from quantisation.int8 import load_weight_rows, replace_with_int8_linear

    weights = dict(model.named_parameters())
    tensors = replace_with_int8_linear(model).state_dict()
    for name, weight in weights.items():
        load_weight_rows(tensors, name, slice(None), weight.detach())
    return model
