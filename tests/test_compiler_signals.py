"""What SIGTERM does while a compiler runs."""

import os
import signal
import subprocess

import pytest
from natives import alive, files, hanging_compiler, start, wait_until


@pytest.fixture
def hanging(monkeypatch, tmp_path):
    return hanging_compiler(monkeypatch, tmp_path)


def test_a_process_that_is_ended_while_it_compiles_leaves_nothing(fresh, hanging):
    process = start(fresh)
    wait_until(lambda: hanging.exists() and hanging.read_text())
    assert len(files(fresh)) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM and files(fresh) == []
    wait_until(lambda: not alive(hanging.read_text()))


def test_a_signal_while_a_compiler_is_started_ends_it_too(fresh, hanging, monkeypatch):
    start = subprocess.Popen

    def started(command, **options):
        process = start(command, **options)
        if "-dM" not in command:
            wait_until(lambda: hanging.exists() and hanging.read_text())
            assert callable(signal.getsignal(signal.SIGTERM))
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(fresh.subprocess, "Popen", started)
    with pytest.raises(SystemExit):
        fresh.load()
    wait_until(lambda: not alive(hanging.read_text()))
    assert files(fresh) == []


def test_another_way_to_end_is_left_alone(fresh, monkeypatch):
    def own(*args):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        fresh.load()
        assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        monkeypatch.setenv("CFLAGS", "-DX")
        fresh.load.cache_clear()
        fresh.load()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
