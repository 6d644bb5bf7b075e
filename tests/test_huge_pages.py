"""Huge pages for weights, with a recorded madvise. Oracle: the addresses of packed weights."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens, run

from native import use_native

SIZE = 2**21
DIRECTORY = Path("/sys/kernel/mm/transparent_hugepage")
LOAD, READ_TEXT = ctypes.CDLL, Path.read_text


@pytest.fixture
def advise(monkeypatch):
    """A function that gives the system these files, and returns the list of calls of madvise."""

    def install(files: dict[str, str], result: int = 0) -> list[tuple]:
        calls = []

        def madvise(address, length, advice) -> int:
            calls.append((address.value, length.value, advice))
            return result

        def read_text(path, *arguments, **options):
            if path.parent != DIRECTORY:
                return READ_TEXT(path, *arguments, **options)
            if path.name not in files:
                raise FileNotFoundError(path)
            return files[path.name]

        def load(name, *arguments, **options):
            library = SimpleNamespace(madvise=madvise)
            return library if name is None else LOAD(name, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(ctypes, "CDLL", load)
        return calls

    return install


def system(enabled: str, size: int = SIZE) -> dict[str, str]:
    return {"enabled": f"{enabled}\n", "hpage_pmd_size": f"{size}\n"}


@pytest.mark.parametrize("size", [SIZE, 2**25])
@pytest.mark.parametrize("enabled", ["always [madvise] never", "[always] madvise never"])
def test_ranges_of_whole_pages_hold_all_weights(tiny_llama, compiled, advise, enabled, size):
    calls = advise(system(enabled, size))
    model = tiny_llama(dtype=torch.float32)
    use_native(model)
    assert calls and all(advice == 25 for _, _, advice in calls)
    assert all(start % size == length % size == 0 and length for start, length, _ in calls)
    for tensor in filter(torch.numel, model.state_dict().values()):
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(start <= first and last <= start + length for start, length, _ in calls)


def test_outputs_stay_when_the_kernel_refuses(tiny_llama, compiled, advise):
    calls = advise(system("always [madvise] never"), result=-1)
    model = tiny_llama(dtype=torch.float32)
    use_native(model)
    assert calls
    prompts = [random_tokens(5)]
    ours = run(model, prompts, max_new_tokens=8, temperature=0)
    assert ours == run(tiny_llama(dtype=torch.float32), prompts, max_new_tokens=8, temperature=0)


def test_the_command_line_uses_them(cli, compiled, advise):
    calls = advise(system("always [madvise] never"))
    options = "--model", CHECKPOINTS / "stories-draft", "--prompt", "Once", "--max-new-tokens", 3
    assert cli(*options, "--backend", "torch")[0] == 0 and not calls
    assert cli(*options, "--backend", "native")[0] == 0 and calls


@pytest.mark.parametrize(
    "files", [{}, system("always madvise [never]"), {"enabled": "[always] madvise never"}], ids=len
)
def test_still_nothing_is_moved_where_the_system_has_none(tiny_llama, compiled, advise, files):
    calls = advise(files)
    use_native(tiny_llama(dtype=torch.float32))
    assert not calls
