"""Where a server looks for garbage."""

import gc
import signal

from serving import Script

import serve


def test_garbage_is_not_looked_for_among_what_stays(tmp_path, monkeypatch):
    """A body of half a million lists would have it looked through several times."""

    def main(words, real=serve.main):
        gc.unfreeze()
        gc.set_threshold(700)
        try:
            real(words)
        finally:
            print(gc.get_freeze_count(), gc.get_threshold()[0])

    monkeypatch.setattr(serve, "main", main)
    with Script(tmp_path) as server:
        server.client()
        server.signal(signal.SIGINT)
        assert server.end()[0] == 130
        frozen, threshold = map(int, server.written(server.out).split()[-2:])
    assert frozen > 100_000 and threshold >= 10_000
