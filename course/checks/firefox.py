"""The page Play in headless Firefox: a script in a copy polls a local server for code to run."""

import contextlib
import http.server
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

PREFERENCES = """user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("network.proxy.type", 1);  // to nowhere: nothing may leave this machine
user_pref("network.proxy.http", "127.0.0.1"); user_pref("network.proxy.http_port", 9);
user_pref("network.proxy.ssl", "127.0.0.1"); user_pref("network.proxy.ssl_port", 9);
"""
SECONDS = 120  # timeout for Firefox to start, and for a function to return
SCRIPT = """<script>addEventListener("load", async () => {
  for (let last = null; ; ) {
    const body = JSON.stringify(last);
    const asked = await fetch("http://127.0.0.1:PORT", { method: "POST", body });
    const [made, value] = await asked.json();
    last = await (0, eval)(made)(value).then((found) => [found], String);
  }
});</script></body>"""


@contextlib.contextmanager
def firefox(book: Path) -> Iterator[Callable]:
    """Yield a function that evaluates JavaScript on Play: (function's source, argument) -> result.

    It raises RuntimeError if the JavaScript fails.
    """
    asks, answers = queue.Queue(), queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = asks.get()
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    def evaluate(function: str, value=None):
        asks.put(json.dumps([function, value]).encode())
        found = answers.get(timeout=SECONDS)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found[0]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "user.js").write_text(PREFERENCES)
        for file in book.resolve().iterdir():
            Path(folder, file.name).symlink_to(file)
        play = Path(folder, "play.html")
        text = play.read_text("utf-8")
        play.unlink()
        script = SCRIPT.replace("PORT", str(server.server_port))
        play.write_text(text.replace("</body>", script), "utf-8")
        command = ["firefox-esr", "--headless", "--no-remote", "--profile", folder, play.as_uri()]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"HOME": folder, "MOZ_DISABLE_CONTENT_SANDBOX": "1"}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
        try:
            answers.get(timeout=SECONDS)  # the page has loaded
            yield evaluate
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
