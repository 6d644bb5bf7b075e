"""Several processes under torchrun: one engine, on rank 0, and the others follow its passes."""

import os
import signal
import subprocess

from conftest import CHECKPOINTS, ROOT
from ranks import SCRIPT, SMALL, TORCHRUN, script, serving, start, texts_of, wait, written

import infer_engine
from engine import options

DRAFT = CHECKPOINTS / "stories-draft"
WRITE = ["--seed", 1, "--temperature", 0.8, "--max-new-tokens", 12]
PROMPTS = ["--prompt", "Tom had a red ball and", "--prompt", "Tom had a red ball", "--prompt", "A"]


def test_torchrun_writes_one_text(engine_cli):
    arguments = ["--model", DRAFT, "--prompt", "Lily", "--max-new-tokens", 8]
    code, out, _ = engine_cli(*arguments)
    command = [*TORCHRUN, "2", SCRIPT, "--device", "cpu", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, **options, env=threads) as process:
        try:
            found, notes = process.communicate(timeout=100)
        finally:
            process.terminate()  # then torchrun ends its own processes; a kill would leave them
    assert (process.returncode, found) == (code, out) == (0, out)
    assert notes.count("tokens/s") == 1


def test_drafts_are_rank_0_s(engine_cli, tmp_path):
    # Without --gamma: whether they are asked for is decided by a clock.
    arguments = [*PROMPTS, *WRITE, "--model", DRAFT, "--draft", DRAFT]
    out = engine_cli(*arguments)[1]
    found, notes = texts_of(2, tmp_path, *arguments)
    assert found == out and "drafts accepted" in notes


def test_rank_0_reads_and_draws_a_seed(tmp_path, engine_cli):
    arguments = ["--model", DRAFT, "--temperature", 1, "--max-new-tokens", 9]
    pipe, end = os.pipe()  # what is in it can be read once
    os.write(end, b"A")
    os.close(end)
    out, err = texts_of(2, tmp_path, *arguments, "--prompt-file", f"/dev/fd/{pipe}")
    os.close(pipe)
    seed = err.splitlines()[0].rsplit(" ", 1)[1]
    assert engine_cli(*arguments, "--prompt", "A", "--seed", seed)[1] == out


def test_bad_input_is_told_once(tmp_path):
    processes = start(2, script, tmp_path, infer_engine.main, ["--model", "nowhere"])
    assert wait(processes)[0] == 2
    (out, err), other = written(tmp_path, 2)
    assert (out, other) == ("", ("", ""))
    assert err.count("\n") == 1 and "unknown model 'nowhere'" in err


def test_other_devices_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "pick_device", lambda name: "cuda")
    processes = start(2, script, tmp_path, infer_engine.main, ["--prompt", "A"])
    assert wait(processes) == [2, 2]
    (out, err), other = written(tmp_path, 2)
    assert (out, other) == ("", ("", ""))
    assert err.endswith("error: several processes compute with --device cpu; not cuda\n")


def test_a_server_of_three_processes(engine_cli, tmp_path):
    llama = ["--model", CHECKPOINTS / "stories-llama"]  # 6 heads and 2 keys: one rank needs both
    text = engine_cli(*SMALL, *llama, "--prompt", "Tom", *WRITE)[1].rstrip("\n")
    path = "/v1/completions"
    body = {"prompt": "Tom", "seed": 1, "temperature": 0.8, "max_tokens": 12, "echo": True}
    endless = {"prompt": "Lily", "max_tokens": 2**18, "ignore_eos": True, "stream": True}
    with serving(tmp_path, "--max-rows", 1, *llama, size=3) as (processes, door):
        for _ in range(2):
            with door.send("POST", path, endless) as answer:
                assert answer.readline()  # and leaves, so the only row is free
            status, found = door.post(path, body)
            assert status == 200, found
            assert found["choices"][0]["text"] == text
        assert written(tmp_path, 3)[1:] == [("", "")] * 2
        os.kill(processes[0].pid, signal.SIGTERM)
        assert wait(processes) == [0, 0, 0]
    (out, err), *others = written(tmp_path, 3)
    assert out.count("\n") == 1 and (err, others) == ("", [("", "")] * 2)
