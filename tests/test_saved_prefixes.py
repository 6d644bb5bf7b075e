"""--prefix-cache: what a script computed, another one finds, unless anything else computes it."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, is_one_line, random_tokens
from engines import greedy, make_engine
from lora_files import LINEAR, random_pairs
from natives import native, quantised
from replicas import make_engine as replica_engine
from replicas import parse, save_small, serving_replicas
from serving import PATH, serving
from test_prefix_files import run

from adapters import Adapters
from engine.options import load_engine
from errors import UserError
from infer import generate
from loading.load import resolve_source

LLAMA = CHECKPOINTS / "stories-llama"
STORY = "Once upon a time, there was a little girl named Lily. She loved to play with her toys."
STATISTICS = re.compile(r"(\d+) positions computed, (\d+) shared( \((\d+) from files\))?")


def write(engine_cli, *options) -> tuple[str, list[int]]:
    """Return the text, and how many positions were computed, shared, and read from files."""
    words = "--model", LLAMA, "--prompt", STORY, "--max-new-tokens", 8
    code, out, err = engine_cli(*words, *options)
    if code:  # before there is such an option
        code, out, err = engine_cli(*words)
    computed, shared, _, loaded = STATISTICS.search(err).groups()
    return out, [int(computed), int(shared), int(loaded or 0)]


def fingerprint(model) -> str | None:
    try:
        from command_line import prefix_cache
    except ImportError:
        return None
    return prefix_cache.fingerprint(model)


@pytest.mark.step(2)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_second_run_reads_the_prompt_from_files(engine_cli, tmp_path, backend):
    options = "--backend", backend, "--prefix-cache", tmp_path / "a"
    text, (whole, shared, loaded) = write(engine_cli, *options)
    assert (shared, loaded) == (0, 0)
    assert write(engine_cli, *options) == (text, [whole - 16, 16, 16])
    assert write(engine_cli, *options, "--prefix-cache-bytes", 2**30)[1] == [whole - 16, 16, 16]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.step(2)
def test_what_changes_a_key_is_not_found(engine_cli, tmp_path):
    """Each of these runs is the first one, and writes what it writes without files."""
    frogs = CHECKPOINTS / "stories-frogs"
    changes = [
        ["--backend", "native"],
        ["--backend", "torch"],
        ["--cache-dtype", "int8"],
        ["--cache-dtype", "float16"],
        ["--dtype", "int8"],
        ["--dtype", "blocks"],
        ["--dtype", "float16", "--backend", "native"],
        ["--page-size", "8"],
        ["--model", str(CHECKPOINTS / "stories")],
        ["--adapter", str(frogs)],
    ]
    for options in changes:
        text, counts = write(engine_cli, *options)
        assert write(engine_cli, *options, "--prefix-cache", tmp_path) == (text, counts), options
    for options in changes:
        text, (whole, *_) = write(engine_cli, *options)
        found = write(engine_cli, *options, "--prefix-cache", tmp_path)
        assert found[0] == text and found[1][0] < whole and found[1][2] >= 16, options


@pytest.mark.step(1)
def test_the_fingerprint_covers_weights_config_and_backend(tiny_llama, monkeypatch):
    def build(seed=0, **shape):
        return tiny_llama(seed, dtype=torch.float32, **shape)

    def changed():
        model = build()
        model.layers[1].mlp.down_proj.weight.data[3, 5] += 1e-6
        return model

    models = [
        *(build(), build(1), changed(), build(rope_theta=5e4), build(norm_eps=1e-5)),
        *(native(build()), native(changed()), build().half(), quantised(build(), torch.int8)),
        quantised(build(), torch.uint8),
    ]
    found = [fingerprint(model) for model in models]
    assert len(set(found)) == len(models)
    assert fingerprint(build()) == found[0]
    assert fingerprint(native(build())) == found[5]
    for owner, name in ((torch, "__version__"), (models[5].runner.library, "key")):
        monkeypatch.setattr(owner, name, "another", raising=False)
        assert fingerprint(models[5]) != found[5]
        monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert fingerprint(build()) != found[0]


def executed_files(model, tmp_path) -> set[str]:
    """Return the project's files with code that an engine and `generate` run to fill pages."""
    from loading.prefix_files import PrefixFiles

    found = set()
    runs = [PrefixFiles(tmp_path / name, "model", 2**30) for name in ("engine", "rows")]
    engine, _ = make_engine(model, [], [], page_size=4, prefix_files=runs[0])
    try:
        sys.setprofile(lambda frame, *_: found.add(frame.f_code.co_filename))
        run(engine, random_tokens(21))
        list(generate(model, [random_tokens(21)], greedy(2), prefix_files=runs[1]))
    finally:
        sys.setprofile(None)
        for files in runs:
            files.close()
    own = [file for file in found if file.startswith(f"{ROOT}/") and "site-packages" not in file]
    return {file.removeprefix(f"{ROOT}/") for file in own}


@pytest.mark.step(1)
def test_the_fingerprint_covers_code_that_fills_pages_and_no_other(request, tmp_path, monkeypatch):
    """Edits of scripts and of the choice of tokens keep saved prefixes."""
    from command_line import prefix_cache

    models = [
        request.getfixturevalue(name)(block_size=64, dtype=torch.float32)
        for name in ("tiny", "tiny_llama", "tiny_gemma", "tiny_windows")
    ]
    models += [native(models[1]), quantised(models[3], torch.int8)]
    ran = set()
    for number, model in enumerate(models):
        ran |= executed_files(model, tmp_path / str(number))
    others = {file for file in ran if file.startswith(("tests/", "constraints/"))}
    others |= {"errors.py", "sampling.py", "lessons.py", "serve.py", "benchmark_kv_cache.py"}
    code = ran - others | {"engine/device.py", "native/gpt.c", "native/common.h"}
    assert {"cache.py", "gemma.py", "engine/cache.py", "native/step.py"} < code
    monkeypatch.setattr(prefix_cache, "ROOT", tmp_path / "code")
    past = {fingerprint(models[0])}
    for file in sorted(code | others):
        (tmp_path / "code" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / file).write_text(file)
        found = fingerprint(models[0])
        assert (found in past) == (file in others), file
        past.add(found)


@pytest.mark.step(3)
def test_an_adapter_of_the_same_name_with_other_weights_is_another_one(tiny_llama, tmp_path):
    from loading.prefix_files import PrefixFiles

    prompt = random_tokens(21)

    def computed(seed: int, name: str) -> tuple:
        model = native(tiny_llama(block_size=64, dtype=torch.float32))
        pairs = {each: random_pairs(model, LINEAR, seed) for each in ("a", "b")}
        model.adapters = Adapters(model, pairs)
        expected = run(make_engine(model, [], [], page_size=4)[0], prompt, adapter=name)[1]
        files = PrefixFiles(tmp_path, "model", 2**30)
        engine, _ = make_engine(model, [], [], page_size=4, prefix_files=files)
        count, output = run(engine, prompt, adapter=name)
        engine.close()
        assert output == expected
        return count

    assert [computed(0, name) for name in ("", "a", "b")] == [24, 24, 24]
    assert [computed(0, name) for name in ("", "a", "b")] == [4, 4, 4]
    assert [computed(1, name) for name in ("", "a", "b")] == [4, 24, 24]
    assert [computed(1, name) for name in ("", "a", "b")] == [4, 4, 4]


@pytest.mark.step(4)
def test_replicas_share_a_directory(tiny_llama, tmp_path):
    model = save_small(tiny_llama, tmp_path / "model")
    args = parse(model)
    args.prefix_cache, args.prefix_cache_bytes = str(tmp_path / "cache"), None
    body = {"prompt": random_tokens(11, 4000), "max_tokens": 3, "ignore_eos": True}

    def ask(client) -> tuple:
        _, found = client.post(PATH, body | {"temperature": 0})
        usage = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], usage

    with serving(lambda: replica_engine(args)) as client:
        first = ask(client)
    assert first[1] == 0
    with serving_replicas(args, 2) as (client, _):
        found = [ask(client) for _ in range(2)]
    assert found == [(first[0], 8)] * 2


@pytest.mark.step(4)
def test_bad_options_are_refused(engine_cli, tmp_path):
    file = tmp_path / "file"
    file.touch()
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    words = "--model", LLAMA, "--prompt", "a"
    for options, said in (
        (["--prefix-cache", file], "--prefix-cache file"),
        (["--prefix-cache", file / "a"], "--prefix-cache file"),
        (["--prefix-cache", public], "--prefix-cache public other"),
        (["--prefix-cache", ""], "--prefix-cache empty directory"),
        (["--prefix-cache-bytes", 5], "--prefix-cache-bytes requires --prefix-cache"),
        (["--prefix-cache", tmp_path / "a", "--prefix-cache-bytes", 0], "--prefix-cache-bytes 0 1"),
        (
            ["--prefix-cache", tmp_path / "a", "--prefix-cache-bytes", 9],
            "-bytes (max_bytes) 9: 16 pages",
        ),
    ):
        assert is_one_line(engine_cli(*words, *options), *said.split()), options


@pytest.mark.step(4)
def test_several_ranks_are_refused(tiny_llama, tmp_path):
    args = parse(save_small(tiny_llama, tmp_path / "model"))
    args.prefix_cache = str(tmp_path / "cache")
    said = ""
    try:
        load_engine(args, resolve_source(args.model), "cpu", SimpleNamespace(rank=1))
    except (UserError, AttributeError) as error:
        said = str(error)
    assert said == "--prefix-cache requires a single process"
