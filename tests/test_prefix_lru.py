"""Files of prefixes: a thread writes them, and the least recently used ones go."""

import contextlib
import os
import threading
import time

import pytest
import torch
from conftest import random_tokens
from engines import alone, greedy, make_engine
from natives import native
from test_prefix_files import files_in, run

from errors import UserError
from loading.prefix_files import PrefixFiles

PAGE = 4 * 2 * 2 * 2 * 4 * 6  # bytes: 2 layers, 2 heads, 4 positions of 6 numbers


@pytest.fixture(scope="module")
def model(tiny_llama):
    return native(tiny_llama(block_size=64, dtype=torch.float32))


@contextlib.contextmanager
def engine_on(directory, model, max_bytes=2**30):
    """An engine with prefix files; all are written after the block."""
    try:
        files = PrefixFiles(directory, "model", max_bytes)
    except TypeError:  # before there is a limit
        files = PrefixFiles(directory, "model")
    engine, _ = make_engine(model, [], [], page_size=4, prefix_files=files)
    yield engine
    getattr(engine, "close", int)()


def restarted(directory, model, prompt, count=4, **options) -> tuple:
    with engine_on(directory, model, **options) as engine:
        return run(engine, prompt, count)


def max_bytes(directory, count: int) -> int:
    """A limit that keeps this many files, after a sixteenth is left free."""
    size = files_in(directory)[0].stat().st_size
    return -(-(count * size) * 16 // 15)


def remaining(directory, model, prompts) -> list[int]:
    """Return how many positions of each prompt are found in files, without changing their times."""
    times = {file: file.stat().st_mtime_ns for file in files_in(directory)}
    saved = {file: file.read_bytes() for file in times}
    found = [len(prompt) - restarted(directory, model, prompt, 1)[0] for prompt in prompts]
    for file in files_in(directory):
        if file not in saved:
            file.unlink()
    for file, data in saved.items():
        file.write_bytes(data)
        os.utime(file, ns=(times[file], times[file]))
    return found


@pytest.mark.step(2)
def test_the_least_recently_used_pages_go_first(model, tmp_path):
    prompts = [random_tokens(41, seed=seed) for seed in range(4)]
    for prompt in prompts[:3]:
        restarted(tmp_path, model, prompt, 1)
        time.sleep(0.01)
    assert len(files_in(tmp_path)) == 30
    restarted(tmp_path, model, prompts[0], 1)  # used again, in files
    limit = max_bytes(tmp_path, 25)
    with engine_on(tmp_path, model, max_bytes=limit) as engine:
        run(engine, prompts[0], 1)
    assert len(files_in(tmp_path)) == 25 and sum_of(tmp_path) <= limit
    # Of the oldest prompt the last pages go first: without the first no other can be found.
    assert remaining(tmp_path, model, prompts[:3]) == [40, 20, 40]
    with engine_on(tmp_path, model, max_bytes=limit) as engine:
        run(engine, prompts[3], 1)
    assert sum_of(tmp_path) <= limit
    found = remaining(tmp_path, model, prompts)
    assert found[0] == found[3] == 40 and found[1] == 0 < found[2] < 40


def sum_of(directory) -> int:
    return sum(file.stat().st_size for file in files_in(directory))


@pytest.mark.step(2)
def test_pages_in_memory_are_used_too(model, tmp_path):
    old, new = random_tokens(41), random_tokens(41, seed=1)
    with engine_on(tmp_path, model) as engine:
        for prompt in (old, new, old):  # at last from memory alone
            run(engine, prompt, 1)
            time.sleep(0.01)
    restarted(tmp_path, model, [7, 7, 7, 7, 7], 1, max_bytes=max_bytes(tmp_path, 12))
    assert remaining(tmp_path, model, [old])[0] == 40
    assert remaining(tmp_path, model, [new])[0] < 40


@pytest.mark.step(2)
def test_the_latest_use_of_a_page_counts(tmp_path, monkeypatch):
    """While it waits to be written, and in its file, which older requests may use, too."""
    writing = threading.Event()
    write = PrefixFiles.write

    def slow(*arguments):
        assert writing.wait(60)
        return write(*arguments)

    monkeypatch.setattr(PrefixFiles, "write", slow)
    for uses in ([(0, 2), (1, 3), (0, 5), (1, 1)], [(0, 4), (1, 2)]):
        files = PrefixFiles(tmp_path, "model", 2**20)
        files.attach([torch.zeros(1, 2, 4, 1, 4, 8)])
        for page, used in uses:
            files.save(0, bytes([page]), page, used * 10**9)
        writing.set()
        files.close()
        found = [tmp_path / files.name(0, bytes([page])) for page in range(2)]
        assert [file.stat().st_mtime for file in found] == [5, 3]


@pytest.mark.step(2)
def test_a_use_of_a_page_that_is_being_written_counts(tmp_path, monkeypatch):
    files = PrefixFiles(tmp_path, "model", 2**20)
    files.attach([torch.zeros(1, 2, 4, 1, 4, 8)])
    replace = os.replace
    used = threading.Event()

    def use_and_replace(*paths):
        if not used.is_set():
            files.save(0, b"page", 0, 5 * 10**9)
            used.set()
        replace(*paths)

    monkeypatch.setattr(os, "replace", use_and_replace)
    files.save(0, b"page", 0, 10**9)
    assert used.wait(60)
    files.close()
    assert [file.stat().st_mtime for file in files_in(tmp_path)] == [5]


@pytest.mark.step(2)
def test_a_file_that_is_being_written_is_new(model, tmp_path, monkeypatch, capfd):
    """Even if its page was used before all others, and another process removes old files."""
    restarted(tmp_path, model, random_tokens(41), 1)
    other = PrefixFiles(tmp_path, "model", max_bytes(tmp_path, 5))
    replace = os.replace

    def replace_late(*paths):
        other.remove_oldest()
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_late)
    files = PrefixFiles(tmp_path, "model", 2**30)
    files.attach([torch.zeros(1, 2, 4, 1, 4, 8)])
    files.save(0, b"page", 0, 10**9)
    files.close()
    assert capfd.readouterr().err == ""
    written = tmp_path / files.name(0, b"page")
    assert written.stat().st_mtime == 1 and len(files_in(tmp_path)) < 10


@pytest.mark.step(2)
def test_only_files_of_pages_are_removed(model, tmp_path):
    (tmp_path / "thesis.safetensors").write_bytes(bytes(10**6))
    (tmp_path / ("a" * 64 + ".torn.tmp")).write_bytes(bytes(10**6))
    (tmp_path / "notes.tmp").write_bytes(bytes(10**6))
    restarted(tmp_path, model, random_tokens(41), max_bytes=2**16)
    names = {file.name for file in files_in(tmp_path)}
    assert len(names) > 2 and {"thesis.safetensors", "notes.tmp"} < names
    assert not any("torn" in name for name in names)


@pytest.mark.step(2)
def test_what_cannot_be_removed_keeps_no_other_file(model, tmp_path, capfd):
    restarted(tmp_path, model, random_tokens(41), 1)
    oldest = [tmp_path / f"{digit * 64}.safetensors" for digit in "01"]
    for directory in oldest:
        directory.mkdir()
        os.utime(directory, (1, 1))
    limit = sum_of(tmp_path) - 1
    with engine_on(tmp_path, model, max_bytes=limit):
        pass
    assert 2 < len(files_in(tmp_path)) < 12 and sum_of(tmp_path) <= limit
    (note,) = capfd.readouterr().err.splitlines()  # of the first one
    assert note.startswith("note: ") and f"{oldest[0]}: cannot be removed" in note


@pytest.mark.step(1)
def test_no_step_waits_for_a_slow_disk(model, tmp_path, monkeypatch):
    """Nor for the queue: what does not fit into it is not saved, until it is used again."""
    from loading import prefix_files

    writing = threading.Event()
    write = prefix_files.PrefixFiles.write
    prompt = random_tokens(41)

    def slow(*arguments):
        assert writing.wait(60)
        return write(*arguments)

    monkeypatch.setattr(prefix_files.PrefixFiles, "write", slow)
    monkeypatch.setattr(prefix_files, "MAX_QUEUED_BYTES", 3 * PAGE, raising=False)
    with engine_on(tmp_path, model) as engine:
        timer = threading.Timer(5, writing.set)  # before the lesson each step waits for it
        timer.start()
        assert run(engine, prompt, 2)[1] == alone(model, prompt, greedy(2))
        assert not writing.is_set()
        timer.cancel()
        writing.set()
    assert len(files_in(tmp_path)) == 3
    monkeypatch.setattr(prefix_files, "MAX_QUEUED_BYTES", 2**20)
    assert restarted(tmp_path, model, prompt, 2)[0] == 42 - 12
    assert restarted(tmp_path, model, prompt, 2)[0] == 42 - 40


@pytest.mark.step(1)
def test_a_full_disk_is_one_note(model, tmp_path, monkeypatch, capfd):
    from loading import prefix_files

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files.os, "replace", full)
    with engine_on(tmp_path, model) as engine:
        for seed in range(2):
            prompt = random_tokens(21, seed=seed)
            assert run(engine, prompt)[1] == alone(model, prompt, greedy(4))
    (note,) = capfd.readouterr().err.splitlines()
    assert note.startswith("note: ") and "No space left on device" in note
    assert files_in(tmp_path) == []
    assert not engine.prefix_files.queued


@pytest.mark.step(2)
def test_a_limit_below_16_pages_is_refused(model, tmp_path):
    from errors import UserError

    allowed = f"must be at least {16 * PAGE}"
    with pytest.raises(
        UserError, match=rf"^--prefix-cache-bytes \(max_bytes\) {16 * PAGE - 1}: {allowed}"
    ):
        with engine_on(tmp_path, model, max_bytes=16 * PAGE - 1):
            pass
    restarted(tmp_path, model, random_tokens(9), max_bytes=16 * PAGE)


@pytest.mark.step(2)
def test_a_refused_limit_removes_nothing(tmp_path):
    file = tmp_path / f"{'0' * 64}.safetensors"
    file.write_bytes(bytes(100))
    files = PrefixFiles(tmp_path, "", 10)
    with pytest.raises(UserError, match="16 pages"):
        files.attach([torch.zeros(1, 2, 4, 1, 4, 8)])
    files.close()
    assert file.exists()
