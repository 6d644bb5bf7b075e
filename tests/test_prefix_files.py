"""Pages of prefixes in files: a new engine finds them, and computes only the rest.

Oracle of the output: `generate`, or an engine without files. C gives the same bits in any batch.
"""

import contextlib
import multiprocessing
import random

import pytest
import torch
from conftest import random_tokens
from engines import alone, finish, greedy, make_engine
from natives import native
from safetensors import safe_open

SHAPES = ["tiny", "tiny_llama", "tiny_gemma", "tiny_windows"]


@contextlib.contextmanager
def engine_on(directory, model, fingerprint="model", max_bytes=2**30, **options):
    """An engine with prefix files; all are written after the block."""
    try:
        from loading.prefix_files import PrefixFiles
    except ImportError:
        files = {}
    else:
        files = {"prefix_files": PrefixFiles(directory, fingerprint, max_bytes)}
    engine, _ = make_engine(model, [], [], **{"page_size": 4} | options, **files)
    try:
        yield engine
    finally:
        engine.close()


def run(engine, prompt, count=4, **options) -> tuple[int, list[int]]:
    """Return how many positions a request computes, and its output."""
    before = engine.num_computed_tokens
    request = engine.add(prompt, greedy(count), **options)
    finish(engine)
    assert request.finish_reason == "length"
    found = engine.num_computed_tokens - before
    assert found == len(prompt) + count - 1 - request.num_cached_tokens
    return found, request.output


def restarted(directory, model, prompt, count=4, cache_salt="", **options) -> tuple:
    with engine_on(directory, model, **options) as engine:
        return run(engine, prompt, count, cache_salt=cache_salt)


def files_in(directory) -> list:
    return sorted(directory.iterdir()) if directory.exists() else []


@pytest.fixture(scope="module")
def model(tiny_llama):
    return native(tiny_llama(block_size=64, dtype=torch.float32))


@pytest.mark.step(3)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_engine_computes_only_the_rest(request, tmp_path, shape, dtype):
    """With one KV cache group, or two."""
    model = native(request.getfixturevalue(shape)(block_size=64, dtype=torch.float32))
    prompt = random_tokens(43)
    options = {"cache_dtype": dtype, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    directory = tmp_path / "a" / "b"
    first = restarted(directory, model, prompt, **options)
    assert first == (43 + 3, alone(model, prompt, greedy(4), None, dtype))
    assert restarted(directory, model, prompt, **options) == (3 + 3, first[1])
    longer = prompt + first[1] + [7]  # the output filled a page, too
    expected = alone(model, longer, greedy(4), None, dtype)
    assert restarted(directory, model, longer, **options) == (48 + 3 - 44, expected)


@pytest.mark.step(1)
def test_a_file_is_a_safetensors_file_of_one_page(model, tmp_path):
    directory = tmp_path / "cache"
    with engine_on(directory, model) as engine:
        run(engine, random_tokens(9), 1)
        (request,) = [engine.add(random_tokens(9), greedy(3))]
        engine.step()
        pages = [engine.cache.storage[:, :, page].clone() for page in request.pages[:2]]
    files = files_in(directory)
    assert len(files) == 2 and directory.stat().st_mode & 0o777 == 0o700
    found = []
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["name"] == file.name
            found.append(opened.get_tensor(*opened.keys()))
    assert any(torch.equal(found[0], page) for page in pages)
    assert any(torch.equal(found[1], page) for page in pages)


@pytest.mark.step(3)
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gemma"])
def test_pages_that_memory_has_evicted_are_found_in_files(request, tmp_path, shape):
    """In a pool of 12 pages, with preemptions; the outputs are those of `generate`."""
    model = native(request.getfixturevalue(shape)(block_size=40, dtype=torch.float32))
    beginnings = [random_tokens(16, seed=seed) for seed in range(4)]
    options = {"num_pages": 12, "max_num_seqs": 3, "max_num_batched_tokens": 9}
    computed = []
    for directory in (tmp_path / "a", tmp_path / "a"):
        with engine_on(directory, model, **options) as engine:
            requests = []
            for seed in range(16):
                prompt = beginnings[seed % 4] + random_tokens(1 + seed // 4, seed=seed)
                requests.append(engine.add(prompt, greedy(8)))
            finish(engine)
            computed.append(engine.num_computed_tokens)
            assert engine.scheduler.num_preemptions
            for own in requests:
                assert own.output == alone(model, own.tokens[: own.prompt_length], greedy(8))
    assert files_in(tmp_path / "a") and computed[1] < computed[0]


@pytest.mark.step(2)
def test_other_tokens_salts_models_and_pages_are_not_found(model, tiny_llama, tmp_path):
    prompt = random_tokens(21)
    other = native(tiny_llama(1, block_size=64, dtype=torch.float32))
    whole = 21 + 3
    assert restarted(tmp_path, model, prompt, cache_salt="a")[0] == whole
    assert restarted(tmp_path, model, prompt, cache_salt="a")[0] == whole - 20
    changes = [
        ({"cache_salt": "b"}, model),
        ({"fingerprint": "other"}, other),
        ({"cache_salt": "a", "page_size": 5}, model),
        ({"cache_salt": "a", "cache_dtype": torch.float16}, model),
        ({"cache_salt": "a", "cache_dtype": torch.int8}, model),
    ]
    for options, changed in changes:
        dtype = options.get("cache_dtype")
        expected = whole, alone(changed, prompt, greedy(4), None, dtype)
        assert restarted(tmp_path, changed, prompt, **options) == expected
    assert restarted(tmp_path, model, prompt[1:], cache_salt="a")[0] == whole - 1


def damages(files: list, foreign: list, choose) -> list:
    """Ways to damage a file, each a function of a file."""

    def flip(file):
        data = bytearray(file.read_bytes())
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        file.write_bytes(data)

    def cut(file):
        data = file.read_bytes()
        file.write_bytes(data[: choose.choice([0, 1, 8, 100, choose.randrange(len(data))])])

    def lengthen(file):
        file.write_bytes(file.read_bytes() + bytes(choose.randrange(1, 9)))

    def swap(file):
        file.write_bytes(choose.choice([other for other in files if other != file]).read_bytes())

    def replace(file):
        file.write_bytes(choose.choice(foreign).read_bytes())

    def empty(file):
        file.write_bytes(bytes(file.stat().st_size))

    def remove(file):
        file.unlink()

    def make_directory(file):
        file.unlink()
        file.mkdir()

    return [flip, flip, cut, cut, lengthen, swap, replace, empty, remove, make_directory]


@pytest.mark.step(4)
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gemma"])
def test_a_damaged_file_is_a_miss(request, tmp_path, shape, capfd):
    build = request.getfixturevalue(shape)
    model = native(build(block_size=64, dtype=torch.float32))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    prompt = random_tokens(41)
    expected = alone(model, prompt, greedy(4))
    other = native(build(1, block_size=64, dtype=torch.float32))
    restarted(tmp_path / "other", other, prompt, fingerprint="other", **options)
    whole = restarted(tmp_path / "own", model, prompt, **options)
    assert whole == (44, expected) and len(files_in(tmp_path / "own")) >= 11
    capfd.readouterr()
    choose = random.Random(0)
    for _ in range(20):
        files = files_in(tmp_path / "own")
        saved = {file: file.read_bytes() for file in files}
        damage = choose.choice(damages(files, files_in(tmp_path / "other"), choose))
        damaged = choose.choice(files)
        damage(damaged)
        computed, output = restarted(tmp_path / "own", model, prompt, **options)
        assert output == expected, damage.__name__
        assert 4 <= computed <= 44
        notes = capfd.readouterr().err.splitlines()
        assert all(is_note(line) for line in notes) and len(notes) <= 2
        if damaged.is_dir():
            damaged.rmdir()
        for file, data in saved.items():
            file.write_bytes(data)


def is_note(line: str) -> bool:
    return line.startswith("note: ") and (".safetensors" in line or "Is a directory" in line)


@pytest.mark.step(4)
def test_a_damaged_page_is_computed_and_saved_again(model, tmp_path, capfd):
    prompt = random_tokens(41)
    restarted(tmp_path, model, prompt)
    saved = {file: file.read_bytes() for file in files_in(tmp_path)}
    for file in saved:
        file.write_bytes(b"torn")
    assert restarted(tmp_path, model, prompt)[0] == 44
    notes = capfd.readouterr().err.splitlines()
    assert len(set(notes)) == len(notes) == len(saved) == 11 and all(map(is_note, notes))
    assert {file: file.read_bytes() for file in files_in(tmp_path)} == saved


@pytest.mark.step(4)
def test_two_processes_share_a_directory(model, tmp_path):
    prompts = [random_tokens(30, seed=seed % 3) for seed in range(6)]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work(order):
        torch.set_num_threads(1)
        for index in order:
            results.put((index, restarted(tmp_path, model, prompts[index], max_bytes=2**15)))

    processes = [
        context.Process(target=work, args=(order,)) for order in (range(6), range(5, -1, -1))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for _ in range(12):
        index, (computed, output) = results.get()
        assert output == alone(model, prompts[index], greedy(4)) and 5 <= computed <= 33
    assert restarted(tmp_path, model, prompts[0])[0] < 33


def test_still_no_files_without_a_directory(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, _ = make_engine(model, [], [], page_size=4)
    assert [run(engine, random_tokens(21))[0] for _ in range(2)] == [24, 4]
    assert files_in(tmp_path) == []
