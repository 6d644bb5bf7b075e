"""A server on Ray, as its users start it."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from conftest import ROOT
from replicas import OPTIONS
from serving import Client, metric_families
from serving import until as until_in

until = functools.partial(until_in, seconds=100)


class Server:
    """A process of serve_ray.py, in a session of its own, of which nothing is left after the block.

    directory: for what it says, in files: a pipe is open as long as a process of Ray has it.
    """

    def __init__(self, model, directory, *options):
        command = [sys.executable, "serve_ray.py", "--port", 0, "--cpus", 0.1, "--model", model]
        command = [str(word) for word in [*command, *OPTIONS, *options]]
        self.out = directory / "stdout"
        self.err = directory / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            own = {"cwd": ROOT, "start_new_session": True}
            self.process = subprocess.Popen(command, stdout=out, stderr=err, **own)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)

    def pids(self, name: str = "") -> list[int]:
        found = subprocess.run(["ps", "-wweo", "sid=,pid=,args="], capture_output=True, text=True)
        lines = [line.split(None, 2) for line in found.stdout.splitlines()]
        own = str(self.process.pid)
        return [int(pid) for sid, pid, args in lines if sid == own and name in args]

    def result(self) -> tuple[int, str]:
        """Return the exit code and stderr of a server that ends and leaves no process."""
        code = self.process.wait(100)
        until(lambda: not self.pids())
        return code, self.err.read_text()


@contextlib.contextmanager
def start(model, directory, *options) -> Iterator[tuple[Client, Server]]:
    with Server(model, directory, *options) as server:
        until(lambda: server.out.read_text().endswith("\n") or server.process.poll() is not None)
        assert server.out.read_text(), server.err.read_text()
        yield Client(int(server.out.read_text().rsplit(":", 1)[1]), None, None), server
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
            assert server.result() == (130, "")


def samples(client, name: str, **labels) -> dict[str, float]:
    families = metric_families(client)
    assert len({family.name for family in families}) == len(families)
    return {
        sample.labels["engine"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    }
