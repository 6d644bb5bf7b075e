"""A GPU for tests that computes on the CPU, refuses to mix devices, and counts what costs time.

It follows CUDA's rules. An operation needs all its tensors on one device, except that a 0-d CPU
tensor may join and a CPU index is uploaded. A result that the host reads, or whose shape depends on
values, is a sync: the host waits for the GPU. A capture allows neither uploads nor syncs.
"""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
# The shapes of these results depend on values, except for the first one, which returns a number.
SYNCS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.equal,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class PretendGPU:
    """The counts of the device since `reset`: operation -> number."""

    def __init__(self):
        self.capturing = False
        self.reset()

    def reset(self) -> None:
        self.launches = Counter()
        self.uploads = Counter()
        self.syncs = Counter()

    def count(self, counter: str, operation) -> None:
        if self.capturing and counter != "launches":
            raise RuntimeError(f"{operation}: a capture allows no {counter}")
        getattr(self, counter)[str(operation.overloadpacket)] += 1

    def run(self, operation, args: tuple, kwargs: dict):
        """Check and count an operation, and run it on the values."""
        if is_composite(operation):
            return operation.decompose(*args, **kwargs)
        packet = operation.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            return self.copy(operation, args, kwargs)
        tensors = list(tensors_of((*args, *kwargs.values())))
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, PretendTensor) and tensor.dim():
                if packet not in INDEXING or not index:
                    raise RuntimeError(f"{operation}: expected all tensors on one device")
                self.count("uploads", operation)
        has_mask = packet in INDEXING and any(each.dtype == torch.bool for each in tensors[1:])
        if packet in SYNCS or has_mask:
            self.count("syncs", operation)
        elif not operation.is_view:
            self.count("launches", operation)
        result = operation(*held_values(args), **cpu_arguments(kwargs))
        in_place = {id(each.held): each for each in tensors if isinstance(each, PretendTensor)}
        if isinstance(result, torch.Tensor):
            return in_place[id(result)] if id(result) in in_place else PretendTensor(result)
        return tree_map_only(torch.Tensor, PretendTensor, result)

    def copy(self, operation, args: tuple, kwargs: dict):
        """Copy between devices or on one."""
        if operation.overloadpacket is aten.copy_:
            to_gpu = isinstance(args[0], PretendTensor)
            source = args[1]
        else:
            device = kwargs.get("device")
            to_gpu = device is None or torch.device(device).type == NAME
            source = args[0]
        from_gpu = isinstance(source, PretendTensor)
        counter = {(True, False): "uploads", (False, True): "syncs"}.get((to_gpu, from_gpu))
        self.count(counter or "launches", operation)
        result = operation(*held_values(args), **cpu_arguments(kwargs))
        if operation.overloadpacket is aten.copy_:
            return args[0]
        return PretendTensor(result) if to_gpu else result

    def moved(self, tensor: torch.Tensor) -> "PretendTensor":
        """Return a tensor of the device, without counting an upload."""
        return PretendTensor(tensor.detach().clone())

    def move(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model on the device."""
        model = copy.deepcopy(model)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    tensor = self.moved(parameter)
                    module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            for name, tensor in module._buffers.items():
                module._buffers[name] = self.moved(tensor)
        return model

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


class PretendGraph:
    """A step that is captured, as `graphs.CapturedStep` does it on CUDA: a replay is one launch.

    A replay runs the same operations again, and fails if they differ from the captured ones.
    """

    def __init__(self, function, packed: torch.Tensor, device: torch.device):
        self.function = function
        self.packed = packed.to(device)
        self.outputs, self.operations = self.record()

    def record(self) -> tuple:
        before = gpu().launches.copy()
        with gpu().capture():
            outputs = self.function(self.packed)
        return outputs, gpu().launches - before

    def __call__(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.packed.copy_(packed)
        launches = gpu().launches.copy()
        outputs, operations = self.record()
        assert operations == self.operations
        gpu().launches = launches + Counter({"graph": 1})
        for held, new in zip(self.outputs, outputs):  # in the same memory
            held.held.copy_(new.held)
        return self.outputs


class PretendTensor(torch.Tensor):
    """A tensor on the device. held: its values, on the CPU."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "PretendTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: torch.Tensor):
        self.held = held

    def __repr__(self) -> str:
        return f"PretendTensor({self.held})"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return gpu().run(operation, args, kwargs or {})


@functools.cache
def is_composite(operation) -> bool:
    """Return whether an operation only calls others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key)


def tensors_of(arguments: tuple | list) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from tensors_of(each)


def held_values(arguments: tuple | list) -> list:
    """Return arguments with the values in place of the device's tensors."""
    return [
        each.held
        if isinstance(each, PretendTensor)
        else held_values(each)
        if isinstance(each, tuple | list)
        else each
        for each in arguments
    ]


def cpu_arguments(kwargs: dict) -> dict:
    values = dict(zip(kwargs, held_values(kwargs.values())))
    return values | {"device": "cpu"} if "device" in kwargs else values


@pytest.fixture(name="no_inference_mode")
def no_inference_mode_fixture():
    with no_inference_mode():
        yield


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """Make it torch.no_grad, because torch has no views of wrapped tensors in inference mode."""

    def enter(self):
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()

    def leave(self, *error):
        self.no_grad.__exit__(*error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.inference_mode, "__enter__", enter)
        patch.setattr(torch.inference_mode, "__exit__", leave)
        yield


@functools.cache
def gpu() -> PretendGPU:
    """Return the device; the first call registers it in torch under the name "pretend"."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    for name in (
        "empty.memory_format",
        "empty_strided",
        "arange.start_step",
        "arange.start",
        "arange",
    ):
        operation = getattr(getattr(aten, name.split(".")[0]), (name + ".default").split(".")[1])
        library.impl(name, functools.partial(make_empty, operation), "PrivateUse1")
    library.impl("_copy_from", upload, "PrivateUse1")
    gpu.library = library  # it unregisters all when it is collected
    return PretendGPU()


def make_empty(operation, *args, **kwargs) -> PretendTensor:
    return PretendTensor(operation(*args, **kwargs | {"device": "cpu"}))


def upload(source: torch.Tensor, target: PretendTensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy what torch itself uploads, such as the list of torch.tensor(list)."""
    gpu().count("uploads", aten.copy_.default)
    target.held.copy_(source)
    return target
