"""Several processes under torchrun: one engine, on rank 0, and the others follow its passes."""

import os
import subprocess

from conftest import CHECKPOINTS, ROOT
from ranks import SCRIPT, TORCHRUN, run_engine_script, script, start, wait, written

import infer_engine

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
            found, notes = process.communicate(timeout=200)
        finally:
            process.terminate()  # then torchrun ends its own processes; a kill would leave them
    assert (process.returncode, found) == (code, out) == (0, out)
    assert notes.count("tokens/s") == 1


def test_drafts_are_rank_0_s(engine_cli, tmp_path):
    # Without --gamma: whether they are asked for is decided by a clock.
    arguments = [*PROMPTS, *WRITE, "--model", DRAFT, "--draft", DRAFT]
    out = engine_cli(*arguments)[1]
    found, notes = run_engine_script(2, tmp_path, *arguments)
    assert found == out and "drafts accepted" in notes


def test_rank_0_reads_and_draws_a_seed(tmp_path, engine_cli):
    arguments = ["--model", DRAFT, "--temperature", 1, "--max-new-tokens", 9]
    pipe, end = os.pipe()  # what is in it can be read once
    os.write(end, b"A")
    os.close(end)
    out, err = run_engine_script(2, tmp_path, *arguments, "--prompt-file", f"/dev/fd/{pipe}")
    os.close(pipe)
    seed = err.splitlines()[0].rsplit(" ", 1)[1]
    assert engine_cli(*arguments, "--prompt", "A", "--seed", seed)[1] == out


def test_bad_input_is_told_once(tmp_path):
    processes = start(2, script, tmp_path, infer_engine.main, ["--model", "nowhere"])
    assert wait(processes)[0] == 2
    (out, err), other = written(tmp_path, 2)
    assert (out, other) == ("", ("", ""))
    assert err.count("\n") == 1 and "unknown model 'nowhere'" in err
