"""Ranks for tests: forked with torchrun's environment, so that none imports torch again."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, ROOT, random_tokens
from serving import Client

import infer_engine
import serve
from loading.load import load_model, save_model
from native import build, use_native
from native.linear import replace_with_native_linear
from parallel.ranks import TensorParallelGroup
from parallel.shards import load_shard, parallelize_vocabulary

SMALL = ["--model", CHECKPOINTS / "stories-draft", "--backend", "torch"]
LLAMA = CHECKPOINTS / "stories-llama"
SAMPLES = ["--model", LLAMA, "--prompt", "Lily", "--num-samples", 3, "--max-new-tokens", 9]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# The largest difference between logits on ranks and in one process. In float32, torch's kernels may
# round by shape. In int8 nothing lies between none and 0.1: an activation rounded the other way.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.int8: 0}
SECONDS = 90  # time limit of a process, which then prints its stack


def run_store(connection) -> None:
    """Run torchrun's store in a process that outlives the ranks."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    time.sleep(2 * SECONDS)  # it is killed before, if the test can do so


def start(size: int, action, *arguments) -> list:
    """Start `size` processes that call an action."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    keeper = context.Process(target=run_store, args=(there,), daemon=True)
    keeper.start()
    assert here.poll(SECONDS)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(here.recv())}
    shared |= {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": LOOPBACK}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def work(rank):
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
        signal.alarm(SECONDS)
        os.environ.update(shared, RANK=str(rank))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
        action(*arguments)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.keeper = keeper
        process.start()
    return processes


def wait(processes, seconds: float = SECONDS + 10) -> list[int]:
    """Return the exit codes within a time limit, and kill what still runs."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in [*processes, processes[0].keeper]:
            process.kill()
            process.join()


def results(size: int, action, *arguments) -> list:
    with tempfile.TemporaryDirectory() as directory:

        def work():
            try:
                found = action(*arguments)
            except BaseException:
                found = traceback.format_exc()
            Path(directory, os.environ["RANK"]).write_bytes(pickle.dumps(found))

        assert wait(start(size, work)) == [0] * size
        found = [pickle.loads(Path(directory, str(rank)).read_bytes()) for rank in range(size)]
    for result in found:
        assert not isinstance(result, str), result
    return found


def script(directory, main, arguments) -> None:
    """Run a script with stdout and stderr in files out0, err0, ... of a directory."""
    for number, name in ((1, "out"), (2, "err")):
        with open(directory / f"{name}{os.environ['RANK']}", "w") as file:
            os.dup2(file.fileno(), number)
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        setattr(sys, f"std{name}", stream)
        setattr(sys, f"__std{name}__", stream)
    main(["--device", "cpu", *map(str, arguments)])


def run_engine_script(size, directory, *arguments) -> tuple[str, str]:
    """Run infer_engine.py on `size` ranks and return rank 0's output; others must write none."""
    assert wait(start(size, script, directory, infer_engine.main, arguments)) == [0] * size
    (out, err), *others = written(directory, size)
    assert others == [("", "")] * (size - 1)
    return out, err


def wait_for_output(directory, process, sign: str) -> str:
    """Return the stdout of the first process as soon as it contains `sign`."""
    out = directory / "out0"
    while not (out.exists() and sign in out.read_text()):
        assert process.is_alive()
        process.join(0.05)
    return out.read_text()


@contextlib.contextmanager
def serving(directory, *arguments, size: int = 2):
    """Yield the processes of a server on `size` ranks, and a Client to it."""
    words = [*SMALL, "--port", 0, *arguments]
    processes = start(size, script, directory, serve.main, words)
    try:
        address = wait_for_output(directory, processes[0], "\n")
        yield processes, Client(int(address.rsplit(":", 1)[1]), None, None)
    finally:
        wait(processes, 0)


def written(directory, size: int) -> list[tuple[str, str]]:
    names = [("out", "err")] * size
    return [
        tuple((directory / f"{name}{rank}").read_text() for name in pair)
        for rank, pair in enumerate(names)
    ]


def parallel_model(name, tp_group, dtype=torch.float32, native=True):
    """Load this rank's shard of a model. native: with products in C."""
    model = load_shard(name, dtype, tp_group=tp_group)
    if native:
        use_native(model)
    parallelize_vocabulary(model)
    return model


def logits_of(name, tokens, *parallel_mode, dtype=torch.float32, native=True):
    """Return a rank's logits of tokens, (1, T), (collectives, bytes sent), and its KV heads."""
    with TensorParallelGroup(*parallel_mode) as tp_group, torch.inference_mode():
        model = parallel_model(name, tp_group, dtype, native)
        logits = model(tokens)
        counts = tp_group.collectives, tp_group.bytes_sent
        return logits.numpy(), counts, model.n_kv_head


def compared(size, name, tokens, *parallel_mode, **options) -> tuple:
    """Return rank 0's largest difference from one process, its counts, and all ranks' KV heads."""

    def action():
        return logits_of(name, tokens, *parallel_mode, **options)

    with attention_in_float64():
        found = results(size, action)
        difference = torch.from_numpy(found[0][0]) - single_process_logits(name, tokens, **options)
    return difference.abs().max().item(), found[0][1], [heads for *_, heads in found]


def check_logits_of_ranks(directory, dtype: torch.dtype, length: int = 40) -> None:
    """Three ranks compute the logits of one process, up to rounding."""
    found, *_ = compared(3, directory, torch.tensor([random_tokens(length)]), dtype=dtype)
    assert found <= ROUNDING[dtype]


@contextlib.contextmanager
def attention_in_float64():
    """Compute torch's attention in float64, in this process and in those it starts meanwhile.

    The kernel depends on the processor and on the number of heads, and a rank has fewer heads. In
    float32 it may give other last bits then, and an int8 activation be rounded the other way.
    """
    functions = torch.nn.functional
    attend = functions.scaled_dot_product_attention

    def in_float64(queries, keys, values, attn_mask=None, **options):
        wide = (each.double() for each in (queries, keys, values))
        return attend(*wide, attn_mask, **options).to(queries.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "scaled_dot_product_attention", in_float64)
        yield


def single_process_logits(name, tokens, dtype=torch.float32, native=True) -> torch.Tensor:
    model = load_model(name, dtype)
    if native:
        replace_with_native_linear(model, build.load())
    with torch.inference_mode():
        return model(tokens)


def save_uneven(build, directory, kind: str, **sizes):
    """Save a random model with widths that no number of ranks divides. sizes: other fields."""
    shape = {"vocab_size": 61, "n_embd": 160, "n_head": 5, "block_size": 64}
    if kind == "tiny_llama":
        shape |= {"n_head": 10, "n_kv_head": 5, "head_dim": 32, "n_inner": 224, "n_embd": 70}
    model = build(dtype=torch.float32, **shape | sizes)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 1:  # biases too, which a new model has as zeros
            weight.data.normal_(mean=1, std=0.4, generator=generator)
    save_model(model, directory)
    return directory


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SCRIPT = str(ROOT / "infer_engine.py")
