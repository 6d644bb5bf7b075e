"""Load the models that the options name."""

import torch

from command_line.options import DTYPES, check_utf8
from errors import UserError
from loading.load import Source, load_model
from model import Model


def pick_device(name: str) -> str:
    """Return the device to run on. `auto` is the first available of cuda, mps and cpu.

    Raises UserError for a device that this machine lacks.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in available:
        raise UserError(f"--device {name}: not on this machine, which has {', '.join(available)}")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the torch dtype of that name. Raises UserError if the device has no matmul for it."""
    dtype = DTYPES[name]
    if dtype == torch.int8:
        return dtype  # of the weights only: matmuls run in float32
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        reason = f"not supported on {device}; float32 works everywhere"
        raise UserError(f"--dtype {name}: {reason}") from None
    return dtype


def load_models(names: list, args, device: str) -> list[Model]:
    """Load models with the dtype of the options.

    Raises UserError for a model that cannot be loaded, or a dtype that the device does not support.
    """
    for name in names:
        check_utf8("the model", str(name.name if isinstance(name, Source) else name))
    dtype = pick_dtype(args.dtype, device)
    return [load_model(name, dtype, device) for name in names]
