"""Linear layers with weights packed for gpt.c, and their matrix products in C."""

import ctypes
import math

import torch
import torch.nn as nn


class LinearStruct(ctypes.Structure):
    """The struct Linear of gpt.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "tail_panel", "bias")),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features")),
    ]


def pack(weight: torch.Tensor, panel_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a weight (out, in) in place into panels of `panel_width` outputs.

    Returns the full panels, (out // panel_width, in, panel_width), and a tail panel for the
    remaining outputs, padded with zeros.
    """
    full = len(weight) - len(weight) % panel_width
    panels = weight[:full].view(full // panel_width, weight.shape[1], panel_width)
    for panel, rows in zip(panels, weight.split(panel_width)):  # they share their memory
        panel.copy_(rows.clone().t())
    tail_panel = weight.new_zeros(weight.shape[1], panel_width)
    tail_panel[:, : len(weight) - full] = weight[full:].t()
    return panels, tail_panel


class NativeLinear(nn.Module):
    """A linear layer in C with float32 weights.

    The weight is packed in place, so the replaced layer cannot be used any more. Raises ValueError,
    before anything changes, for tensors that C cannot read.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, library: ctypes.CDLL):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        check_layer(layer, self.out_features, self.in_features)
        panel_width = ctypes.c_int.in_dll(library, "panel_width").value
        self.library = library
        panels, tail_panel = pack(layer.weight.detach(), panel_width)
        self.register_buffer("weight", panels)
        self.register_buffer("tail_panel", tail_panel)
        self.bias = getattr(layer, "bias", None)

    def struct(self) -> LinearStruct:
        """Return the layer's C struct. It holds addresses, so the tensors must not move."""
        tensors = self.weight, self.tail_panel, self.bias
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return LinearStruct(*addresses, self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `F.linear`.

        x: (..., in_features), float32, contiguous or not. Raises ValueError for any other input.
        """
        rows = math.prod(x.shape[:-1])
        x2d = x.reshape(rows, x.shape[-1]).contiguous()
        y = torch.empty(rows, self.out_features)
        self.library.linear(
            ctypes.byref(self.struct()),
            ctypes.c_int64(rows),
            ctypes.c_void_p(address(x2d, torch.float32, rows, self.in_features)),
            ctypes.c_void_p(y.data_ptr()),
            ctypes.c_int(torch.get_num_threads()),
        )
        return y.view(*x.shape[:-1], self.out_features)


class NativeEmbedding(nn.Module):
    """A token embedding that reads rows of a packed weight, which may be the head's."""

    def __init__(self, linear: NativeLinear):
        super().__init__()
        self.linear = linear

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ids (...) as (..., in_features). Raises ValueError for an id out of range."""
        ids = tokens.to(torch.int64).contiguous()
        count = self.linear.out_features
        if not all(0 <= token < count for token in ids.flatten().tolist()):
            raise ValueError(f"ids {ids.tolist()}: must be from 0 to {count - 1}")
        y = torch.empty(*ids.shape, self.linear.in_features)
        struct = ctypes.byref(self.linear.struct())
        addresses = (ctypes.c_void_p(each.data_ptr()) for each in (ids, y))
        self.linear.library.get_rows(struct, ctypes.c_int64(ids.numel()), *addresses)
        return y


def replace_with_native_linear(model: nn.Module, library: ctypes.CDLL) -> None:
    """Replace a model's linear layers and token embedding with native layers.

    Raises ValueError if the layers are native already, or for weights that C cannot read.
    """
    embedding = model.layer("embedding")
    if isinstance(embedding, NativeEmbedding):
        raise ValueError("the layers of this model are native already")
    native = {}  # by the address of the weight, which the embedding and the head may share

    def native_layer(layer):
        address = layer.weight.data_ptr()
        if address not in native:
            native[address] = NativeLinear(layer, library)
        return native[address]

    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, native_layer(layer))
    model.set_submodule(model.path("embedding"), NativeEmbedding(native_layer(embedding)))


def check_layer(layer: nn.Module, out: int, size: int) -> None:
    """Raise ValueError if C cannot read a layer with `out` outputs and `size` inputs."""
    match layer:
        case nn.Linear() | nn.Embedding():
            address(layer.weight, torch.float32, out, size)
            address(getattr(layer, "bias", None), torch.float32, out)
        case _:
            raise ValueError(f"native code computes no layer of type {type(layer).__name__}")


def address(tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Return the address of a tensor's data, None (NULL in C) for no tensor.

    Raises ValueError unless it is a contiguous CPU tensor of this dtype and shape.
    """
    if tensor is None:
        return None
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_neg()  # a lazily negated view: its memory holds the values before negation
    ):
        actual = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        actual += f", strides {tensor.stride()}" + ", negative" * tensor.is_neg()
        expected = f"contiguous {dtype} {shape} on the CPU"
        raise ValueError(f"native code reads {expected}; this is {actual}")
    return tensor.data_ptr()
