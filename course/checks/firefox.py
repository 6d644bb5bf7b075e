"""Firefox without a window, driven over Marionette, its own protocol: JSON over a socket."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFERENCES = {
    "marionette.port": 0,  # any that is free
    "app.update.auto": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.proxy.type": 1,  # to nowhere: nothing may leave this machine
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
}
SECONDS = 60  # for Firefox to start, and for a script to end
# A script of the page itself: others do not see its constants. Its result is an attribute.
SCRIPT = """const script = document.createElement("script");
script.textContent = `(async () => {
  const root = document.documentElement;
  delete root.dataset.result;
  try { root.dataset.result = JSON.stringify([await (${arguments[0]})(${arguments[1]})]); }
  catch (error) { root.dataset.result = JSON.stringify(String(error)); }
})()`;
document.head.append(script);"""


class Page:
    """A page of Firefox, with the two methods of Playwright's that check_play.py needs."""

    def __init__(self, connection: socket.socket):
        self.connection = connection.makefile("rwb")
        self.ids = itertools.count()
        self.read()  # who it is
        self.call("WebDriver:NewSession")

    def read(self):
        size = b""
        while (byte := self.connection.read(1)) != b":":
            size += byte
        return json.loads(self.connection.read(int(size)))

    def call(self, name: str, **values):
        data = json.dumps([0, next(self.ids), name, values]).encode()
        self.connection.write(b"%d:%s" % (len(data), data))
        self.connection.flush()
        _, _, error, result = self.read()
        if error:
            raise RuntimeError(error["message"])
        return result["value"] if result and "value" in result else result

    def goto(self, address: str) -> None:
        self.call("WebDriver:Navigate", url=address)

    def evaluate(self, function: str, value=None):
        """What a function of the page returns for a value."""
        script = SCRIPT.replace("\n", " ")
        self.call("WebDriver:ExecuteScript", script=script, args=[function, json.dumps(value)])
        end = time.monotonic() + SECONDS
        result = None
        while result is None and time.monotonic() < end:
            time.sleep(0.02)
            asked = "return document.documentElement.dataset.result"
            result = self.call("WebDriver:ExecuteScript", script=asked, args=[])
        found = json.loads(result or '"no answer"')
        if isinstance(found, str):
            raise RuntimeError(found)
        return found[0] if found else None


@contextlib.contextmanager
def firefox(command: str = "firefox-esr") -> Iterator[Page]:
    """A new Firefox, ended with all its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in PREFERENCES.items()]
        Path(profile, "user.js").write_text("\n".join(lines))
        arguments = ["--headless", "--no-remote", "--marionette", "--profile", profile]
        environment = os.environ | {"HOME": profile, "MOZ_DISABLE_CONTENT_SANDBOX": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(
            [command, *arguments], env=environment, start_new_session=True, **quiet
        )
        try:
            port = Path(profile, "MarionetteActivePort")
            end = time.monotonic() + SECONDS
            while not port.exists() and time.monotonic() < end:
                time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", int(port.read_text())), SECONDS) as link:
                yield Page(link)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
