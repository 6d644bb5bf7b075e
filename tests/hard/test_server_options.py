"""What serve.py and serve_ray.py refuse, in one line, before a model is loaded."""

import os

import pytest

import serve
import serve_ray

CPUS = os.cpu_count()
REFUSED = {
    "serve": {
        "--port=-1": "--port -1: it must be from 0 to 65535",
        "--port=65536": "--port 65536: it must be from 0 to 65535",
        "--host=": "--host is empty: use 0.0.0.0 to listen on all addresses",
        f"--host={70 * chr(233)}": f"--host {70 * chr(233)}: not a host name",
        "--gamma=2": "--gamma needs --draft",
        "--drain-seconds=-1": "drain_seconds is -1.0; it must be a number from 0 to below 1000000",
        "--max-waiting=-1": "max_waiting is -1; it must be an integer >= 0",
        "--max-waiting-tokens=-1": "max_waiting_tokens is -1; it must be an integer >= 0",
    },
    "serve_ray": {
        "--replicas=0": "replicas is 0; it must be an integer >= 1",
        "--cpus=0.00001": "cpus is 1e-05; it must be a number from 0.0001 to below 1000000",
        "--cpus=1e5": f"--replicas 2 --cpus 100000: this machine has {CPUS} CPUs",
        "--gamma=2": "--gamma needs --draft",
        "--max-replicas=1": "--max-replicas 1: must be at least --replicas (2)",
        "--scale-seconds=0": "scale_seconds is 0.0; it must be a number from 1 to below 1000000",
        "--max-replicas=1000000": f"--max-replicas 1000000 --cpus 1: this machine has {CPUS} CPUs",
    },
}


@pytest.mark.parametrize(
    "script, option, error",
    [(script, *case) for script, cases in REFUSED.items() for case in cases.items()],
)
def test_what_is_wrong_is_one_line(run_main, monkeypatch, script, option, error):
    monkeypatch.setattr(serve, "load_engine", None)  # what is accepted ends here
    main = {"serve": serve, "serve_ray": serve_ray}[script].main
    code, out, err = run_main(main, "--port", 0, option)
    assert (code, out, err.partition("error: ")[2]) == (2, "", f"{error}\n")


@pytest.mark.parametrize(
    "main, option, words",
    [
        (serve.main, "--max-num-seqs=0", "error: max_num_seqs is 0; it must be an integer >= 1\n"),
        (serve.main, "--model=.", "error: .: no config.json in this directory\n"),
        (serve.main, "--model=nowhere/x/y", "unknown model 'nowhere/x/y'"),
        (serve_ray.main, "--routing=luck", "--routing: invalid choice: 'luck' (choose from"),
    ],
)
def test_so_is_what_a_model_cannot_be_loaded_with(
    run_main, monkeypatch, tmp_path, main, option, words
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(main, "--port", 0, option)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err
