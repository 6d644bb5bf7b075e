"""What the lessons' tests share: models small enough to be instant, the embedded one, and the command line."""

import shutil
from pathlib import Path

import hypothesis
import pytest
import torch

from model import GPT, GPTConfig

# The same examples in each run, and no time limit: the first one may have to import torch.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True)
hypothesis.settings.load_profile("course")

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


@pytest.fixture(scope="session")
def stories() -> GPT:
    """The embedded model, in float32."""
    return GPT.from_pretrained(CHECKPOINTS / "stories")


@pytest.fixture(scope="session")
def tiny():
    """A function that builds a random model. Its std makes greedy text wander; float64 keeps rounding out of it."""

    def build(seed: int = 0, dtype: torch.dtype = torch.float64, **shape) -> GPT:
        small = {"vocab_size": 61, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "eos_token_id": 60}
        model = GPT(GPTConfig(**small | shape)).to(dtype)
        return model.init_weights(std=0.2, generator=torch.Generator().manual_seed(seed)).eval()

    return build


@pytest.fixture
def tiny_checkpoint(tiny, tmp_path):
    """A directory with a random model, block_size 64, that speaks the embedded model's vocabulary."""
    tiny(dtype=torch.float32, vocab_size=4096, block_size=64, eos_token_id=4095).save_pretrained(tmp_path)
    shutil.copy(CHECKPOINTS / "stories" / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.fixture
def run_main(capsys):
    """A function that runs a script's `main` with these arguments, in this process: exit code, stdout, stderr."""

    def run(main, *args) -> tuple[int, str, str]:
        try:
            main(["--device", "cpu", *(str(arg) for arg in args)])
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def cli(run_main):
    """A function that runs `infer.py` with these arguments, in this process: exit code, stdout, stderr."""

    def run(*args) -> tuple[int, str, str]:
        import infer

        return run_main(infer.main, *args)

    return run
