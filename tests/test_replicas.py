"""The script that starts engines on Ray, as far as that goes without Ray: see tests/ray_serve."""

import os
import shutil
import sys

import pytest
from conftest import CHECKPOINTS, ROOT

import serve_ray
from errors import UserError
from serve_ray import build


def run_script(run_main, *arguments) -> tuple[int, str, str]:
    assert (ROOT / "serve_ray.py").is_file()
    assert hasattr(serve_ray, "main")
    code, out, err = run_main(serve_ray.main, "--port", 0, *arguments)
    return code, out, err.partition("error: ")[2]


HINT = "Ray is not installed: pip install '.[ray]'\n"


@pytest.mark.parametrize("cpus", [0.0001, os.cpu_count()])
def test_without_ray_a_line_says_what_to_install(run_main, monkeypatch, cpus):
    """With the least and the most that is allowed."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_script(run_main, "--replicas=1", f"--cpus={cpus}") == (2, "", HINT)


def test_still_options_of_serve_run(monkeypatch):
    monkeypatch.setattr("serve_ray.application", lambda args: args)
    args = build({"replicas": "3", "max-num-seqs": "8"})
    assert (args.replicas, args.max_num_seqs) == (3, 8)
    with pytest.raises(UserError, match="replicas 0"):
        build({"replicas": "0"})


def test_each_replica_needs_a_gpu(run_main, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    error = "--replicas 2: each needs a GPU; this machine has 1\n"
    assert run_script(run_main, "--cpus=0.1", "--device=cuda") == (2, "", error)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_script(run_main, "--cpus=0.1", "--device=cuda") == (2, "", HINT)


def test_a_model_without_weights_is_a_line(run_main, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(CHECKPOINTS / "stories-llama" / name, tmp_path)
    error = f"{tmp_path}: no model.safetensors in this directory\n"
    assert run_script(run_main, "--model", tmp_path) == (2, "", error)
