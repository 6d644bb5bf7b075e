"""Load the models that the options name."""

import sys
from collections.abc import Callable

import torch

from command_line.options import DTYPES, check_utf8
from command_line.parser import is_distributed
from draft_head import DraftHead
from errors import UserError
from graphs import CapturedStep, GraphRunner, MakeStep, compile_step, eager_step, has_experts
from loading.draft_head import is_draft_head, load_draft_head
from loading.load import Source, load_model
from model import Model
from native import BuildError, NativeRunner, kernel, use_native


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
    if not dtype.is_floating_point:
        return dtype  # of the weights only: matmuls run in float32
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        reason = f"not supported on {device}; float32 works everywhere"
        raise UserError(f"--dtype {name}: {reason}") from None
    return dtype


def check_compiler(device: str) -> None:
    """Raise UserError if torch.compile does not work here, such as without a C++ compiler."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # torch has many, some of them private
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--compile: torch.compile fails here: {reason}") from None


def pick_step(args, device: str) -> MakeStep | None:
    """Return the MakeStep that the options select; None: steps vary in shape.

    Raises UserError for options that conflict, or if torch cannot compile here.
    """
    if args.compile:
        for option, conflicts in {
            "--enforce-eager": args.enforce_eager,
            "--backend native": args.backend == "native",
            "several processes": is_distributed(),
            f"--device {device}": device not in ("cpu", "cuda"),
        }.items():
            if conflicts:
                raise UserError(f"--compile conflicts with {option}")
        check_compiler(device)
        return compile_step
    if device == "cuda":
        return eager_step if args.enforce_eager else CapturedStep
    return None


def load_models(names: list, args, device: str, load_first: Callable | None = None) -> list[Model]:
    """Load models with the dtype and backend of the options, the first with the adapter.

    load_first: loader for the first model, with the signature of `load_model` (the default).
    Raises UserError for a model that cannot be loaded, or an incompatible backend, dtype and
    device.
    """
    for name in names:
        check_utf8("the model", str(name.name if isinstance(name, Source) else name))
    dtype = pick_dtype(args.dtype, device)
    if args.backend == "native" and device != "cpu":
        raise UserError(f"--backend native requires --device cpu, not {device}")
    make_step = pick_step(args, device)
    first, *others = names
    check_utf8("--adapter", args.adapter or "")
    models = [(load_first or load_model)(first, dtype, device, args.adapter)]
    models += [load_model(name, dtype, device) for name in others]
    if make_step:
        for model in models:
            if make_step is compile_step and has_experts(model):
                raise UserError("--compile: a mixture of experts has no steps of fixed shapes")
            model.runner = GraphRunner(make_step)
    elif device == "cpu" and args.backend != "torch":
        use_native_backend(models, is_explicit=args.backend == "native")
    return models


def names_draft_head(draft) -> bool:
    """Return whether --draft names a draft head, not a draft model or prompt lookup."""
    return draft not in (None, "lookup") and is_draft_head(draft)


def load_head(directory, target: Model) -> DraftHead:
    """Load a draft head with the backend of its target."""
    head = load_draft_head(directory, target)
    if isinstance(target.runner, NativeRunner):
        use_native(head)
    return head


def use_native_backend(models: list[Model], is_explicit: bool) -> None:
    """Use native kernels where possible. If is_explicit, note on stderr what they lack."""
    is_native = False
    for model in models:
        try:
            use_native(model)
            is_native = True
        except BuildError as error:
            print(f"note: {error}; torch computes instead", file=sys.stderr)
            return
        except ValueError as error:  # such as an architecture that gpt.c does not support
            if is_explicit:
                print(f"note: --backend native: {error}; torch computes instead", file=sys.stderr)
    if is_explicit and is_native and ("plain C" in kernel() or "one thread" in kernel()):
        note = f"a slow build: {kernel()}"
        print(f"note: --backend native: {note}", file=sys.stderr)
