"""The options of all benchmarks: help that names what there is, and one line for what is wrong."""

import importlib

import pytest
from benches import save_endless
from conftest import CHECKPOINTS

SCRIPTS = "benchmark_kv_cache.py benchmark_speculative.py".split()
SCRIPTS += [
    f"benchmarks/{name}.py"
    for name in "batching engine client serving scaling progress larger_machines".split()
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(run_file, script):
    code, out = run_file(script, "--help")
    assert code == 0 and out.startswith("usage: ")


REFUSED = {  # script and the options before these -> options, of which the last ones are wrong
    "benchmark_kv_cache --model MODEL --prompt-tokens 5": {
        "--max-new-tokens 6 60": "65 tokens do not fit the context window",
        "--max-new-tokens 1": "--max-new-tokens: '1': must be an integer >= 2",
        "--batch-size 1000000": "--batch-size",
        "--model nowhere": "nowhere",
        "--model random:gpt2 --prompt-tokens 1020 --max-new-tokens 9": "1029 tokens",
        "--threads 1000000": "from 1 to ",
        "--dtype int8": "--dtype",
        "--profile x.txt": "--profile: 'x.txt': the file name must end in .json",
        "--profile no/x.json": "--profile: 'no/x.json': the directory no does not exist",
        "--profile ./run_summary.json": "--profile run_summary.json: --output writes this file",
    },
    "benchmark_speculative --target MODEL --draft MODEL --prompts 2": {
        "--gamma 17": "from 1 to 16",
        "--target random:gpt2": "random:gpt2: random models accept no drafts",
        "--max-new-tokens 20 9 --gamma 4 2": "--max-new-tokens 9: must be at least 2 * (gamma",
        "--temperature nan": "temperature nan: must",
        "--max-new-tokens 12 57": "65 tokens of prompt and output",
    },
    "benchmarks.batching --model MODEL --prompt-tokens 5 --engines cache": {
        "--max-new-tokens 60": "65 tokens do not fit the context window of"
    },
    "benchmarks.engine --model MODEL --draft MODEL --only speculation --prompt-tokens 2 6"
    " --new-tokens 3 8 --long-prompt 20": {
        "--prompt-tokens 6 5": "--prompt-tokens 6 5: the minimum",
        "--new-tokens 6 5": "--new-tokens 6 5: the minimum",
        "--new-tokens 3 59": "65 tokens do not fit the context window",
        "--prompt-tokens 3 43": "65 tokens do not fit the context window",
        "--long-prompt 49": "65 tokens do not fit the context window",
        "--draft random:gpt2": "random:gpt2: random models",
        "--temperature -1": "temperature -1.0: must",
    },
    "benchmarks.client": {
        "": "one of the arguments --request-rate --clients is required",
        "--request-rate 1e308 --seconds 1e9": "1e+09: their product must be at most 1000000",
        "--clients 1 --seconds nan": "'nan': must be a number above 0",
        "--clients 1 --prompt-words 6 5": "--prompt-words 6 5: the minimum",
        "--clients 1 --new-tokens 6 5": "--new-tokens 6 5: the minimum",
        "--clients 1 --url 127.0.0.1:80": "127.0.0.1:80: must be http://HOST:PORT",
        "--clients 1 --url http://a:99999": "http://a:99999: must be",
        "--clients 1 --extra-body []": "--extra-body []: must be a JSON object",
        f"--clients 1 --extra-body {'[' * 10**5}": "[: must be a JSON object",
    },
    "benchmarks.serving --model MODEL --modes engine --prompt-words 2 6 --new-tokens 3 8"
    " --long-prompt 20": {
        "--shares 0.5 -1": "'-1': must be a number above 0",
        "--prompt-words 6 5": "--prompt-words 6 5: the minimum",
        "--new-tokens 3 59": "65 tokens do not fit the context window",
        "--long-prompt 49": "65 tokens do not fit the context window",
    },
    "benchmarks.scaling --model LLAMA": {
        "--ranks 7": "7 processes: this model has 6 heads, and each process needs one",
        "--new-tokens 300": "do not fit the context window",
        "--new-tokens 2": "'2': must be an integer >= 3",
    },
    "benchmarks.larger_machines": {
        "--efficiency 1.5": "--efficiency 1.5: must be at most 1",
        "--positions 8193": "'8193': must be an integer from 1 to 8192",
    },
}


@pytest.fixture(scope="module")
def models(tiny, compiled, tmp_path_factory):
    model = save_endless(tiny, tmp_path_factory.mktemp("models"))
    return {"MODEL": str(model), "LLAMA": str(CHECKPOINTS / "stories-llama")}


CASES = [(line, wrong, said) for line, some in REFUSED.items() for wrong, said in some.items()]


@pytest.mark.parametrize(
    "line, wrong, said", CASES, ids=[f"{line.split()[0]} {wrong[:50]}" for line, wrong, _ in CASES]
)
def test_what_is_wrong_is_one_line(models, capsys, tmp_path, monkeypatch, line, wrong, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.engine.STEPS", 6)  # more do not fit the small model's window
    name, *words = line.split()
    files = ["--device", "cpu", "--output", "run.csv"] if words else []
    options = [*files, *words, *wrong.split()]
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main([models.get(word, word) for word in options])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
