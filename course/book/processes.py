"""Ranks for pictures: processes that are started, compute together, and are ended."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from errors import UserError

PATIENCE = 120  # seconds; what takes longer has failed
START = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
START += "from book import processes; processes.answer()"


def fresh(action: Callable, *arguments) -> Any:
    """What an action returns in a new process, which ends with all that it has started.

    That one may fork ranks: where a process has computed, its fork cannot everywhere. Raises
    UserError if it fails.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # gloo may take another one
    environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    environment["PYTHONUTF8"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    asked = pickle.dumps(sys.path) + pickle.dumps((action, arguments))
    try:
        answer, errors = process.communicate(asked, PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: all are dead
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        said = errors.decode(errors="replace")
        raise UserError(f"the processes of this picture have failed: {said}")
    return pickle.loads(answer)


def answer() -> None:
    """The other end of `fresh`."""
    action, arguments = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(action(*arguments)))


def keep_store(port) -> None:
    """Where ranks find each other. It goes on when they end, as torchrun's does."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def be_rank(rank: int, shared: dict[str, str], found: Connection, action: Callable, arguments):
    os.environ.update(shared, RANK=str(rank))
    found.send_bytes(pickle.dumps(action(*arguments)))  # torch would share memory instead


def start(size: int, action: Callable, *arguments) -> list:
    """So many ranks, each of which calls an action: their processes, and what will tell a result.

    For the inside of `fresh`.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    context.Process(target=keep_store, args=(there,), daemon=True).start()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(here.recv())}
    shared |= {"WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = []
    for rank in range(size):
        result, found = context.Pipe(duplex=False)
        given = rank, shared, found, action, arguments
        process = context.Process(target=be_rank, args=given, daemon=True)
        process.start()
        found.close()  # so that the other end knows when this process ends
        started.append((process, result))
    return started


def on_ranks(size: int, action: Callable, *arguments) -> list:
    """What an action returns on each of so many ranks. For the inside of `fresh`.

    Raises EOFError if one of them fails.
    """
    started = start(size, action, *arguments)
    return [pickle.loads(result.recv_bytes()) for _, result in started]
