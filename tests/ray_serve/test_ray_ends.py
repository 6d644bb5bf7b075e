"""Ray itself dies: all ends, with a line; what Ray starts again is not the end."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys

import pytest
from on_ray import start, until

pytest_plugins = ["ray_fixtures"]
PATH = "/v1/completions"
BODY = {"prompt": "Tom", "max_tokens": 2**18, "ignore_eos": True, "stream": True}


def test_a_killed_controller_comes_again_and_a_killed_raylet_ends_all(model, tmp_path):
    with start(model, tmp_path) as (client, server):
        (controller,) = server.pids("ray::ServeController")
        os.kill(controller, signal.SIGKILL)
        until(lambda: set(server.pids("ray::ServeController")) - {controller})
        with client.send("POST", PATH, BODY) as answer:
            assert answer.readline()
            (raylet,) = server.pids("raylet/raylet")
            os.kill(raylet, signal.SIGKILL)
            lines = []
            with contextlib.suppress(ConnectionError):
                lines = list(iter(answer.readline, b""))
            assert b"data: [DONE]\n" not in lines
        code, said = server.result()
        assert code == 2
        line = r"serve_ray.py: error: Ray's raylet has ended; its logs are in /.*/logs\n"
        assert re.fullmatch(line, said)


@pytest.mark.parametrize("name", ["gcs_server", "log_monitor"])
def test_of_ray_s_own_processes_two_are_needed(monkeypatch, name):
    import ray

    import serve_ray
    from errors import UserError

    class Node:
        looks = 0

        def dead_processes(self):
            self.looks += 1
            if self.looks == 3:
                signals.put(signal.SIGTERM)
            return [(name, None)] if self.looks > 1 else []

        def get_logs_dir_path(self):
            return "/logs"

    import psutil  # found once ray is imported

    signals = queue.SimpleQueue()
    monkeypatch.setattr(ray._private.worker, "_global_node", Node())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        own = [psutil.Process(child.pid)]
        found = {True: own, False: []}
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: found[recursive])
        if name == "log_monitor":
            assert serve_ray.wait_for_signal(signals) == signal.SIGTERM
            assert child.poll() is None
            child.kill()
        else:
            with pytest.raises(UserError, match="Ray's gcs_server has ended; .* in /logs"):
                serve_ray.wait_for_signal(signals)
            assert child.wait(60) == -signal.SIGKILL
