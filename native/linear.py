"""Linear layers with weights packed for gpt.c, and their matrix products in C."""

import ctypes
import math

import torch
import torch.nn as nn

from quantisation.blocks import BLOCK_SIZE, BlockLinear
from quantisation.int8 import Int8Linear


class AdapterStruct(ctypes.Structure):
    """The struct Adapter of gpt.c."""

    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class LinearStruct(ctypes.Structure):
    """The struct Linear of gpt.c."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("weight", "tail_panel", "scale", "minimum", "compensation", "bias")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("out_features", "in_features", "row_stride", "quant_type", "scale_type")
        ),
        ("adapters", ctypes.POINTER(AdapterStruct)),
    ]


# Quantisation types of weights, as in gpt.c.
QUANT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
Q8 = 4  # quantised in blocks
Q4 = 5
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes without scales
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes


def pack(
    weight: torch.Tensor, panel_width: int, group_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a weight (out, in) in place into panels of `panel_width` outputs.

    Returns the full panels, (out // panel_width, groups, panel_width), each element a group of
    weights, and a tail panel for the remaining outputs, padded with zeros. If `in` is not a
    multiple of the group size, a copy of the weight with zero-padded rows is packed instead.
    """
    if weight.shape[1] % group_size:
        weight = nn.functional.pad(weight, (0, -weight.shape[1] % group_size))
    units = weight.flatten().view(INT_OF_SIZE[weight.itemsize * group_size])  # flat: in may be 0
    units = units.view(len(weight), weight.shape[1] // group_size)
    full = len(units) - len(units) % panel_width
    panels = units[:full].view(full // panel_width, units.shape[1], panel_width)
    for panel, rows in zip(panels, units.split(panel_width)):  # they share their memory
        panel.copy_(rows.clone().t())
    tail_panel = units.new_zeros(units.shape[1], panel_width)
    tail_panel[:, : len(units) - full] = units[full:].t()
    return panels, tail_panel


def pack_scales(scale: torch.Tensor, panel_width: int) -> torch.Tensor:
    """Pack the scales of blocks, (out, blocks), for C: (panels, blocks, panel_width).

    Zeros pad the last panel. The result has an integer dtype of the same size, so that no dtype
    conversion of the model changes it.
    """
    units = scale.view(INT_OF_SIZE[scale.itemsize])
    units = nn.functional.pad(units, (0, 0, 0, -len(units) % panel_width))
    return units.unflatten(0, (-1, panel_width)).transpose(1, 2).contiguous()


class NativeLinear(nn.Module):
    """A linear layer in C with float, int8 (one scale per row) or block-quantised weights.

    16-bit weights are converted to float32 as C reads them, a 16-bit bias here. Everything else is
    float32. The weight is packed in place, so the replaced layer cannot be used any more. Raises
    ValueError, before anything changes, for tensors that C cannot read.
    """

    scale_type = 0
    adapters: ctypes.Array | None = None  # one AdapterStruct for each adapter of the model

    def __init__(
        self, layer: nn.Linear | nn.Embedding | Int8Linear | BlockLinear, library: ctypes.CDLL
    ):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        if isinstance(layer, BlockLinear):
            self.in_features = layer.in_features
        check_layer(layer, self.out_features, self.in_features)
        names = "panel_width", "int8_group", "activation_zero_point"
        panel_width, int8_group, zero_point = (
            ctypes.c_int.in_dll(library, name).value for name in names
        )
        weight = layer.weight.detach()
        scale = minimum = compensation = None
        match layer:
            case BlockLinear(block_format=block_format):
                group_size = 4
                self.quant_type = Q8 if block_format.bits == 8 else Q4
                self.scale_type = QUANT_TYPES[block_format.dtype]
                scale = pack_scales(layer.scale, panel_width)
                if block_format.has_minimum:
                    minimum = pack_scales(layer.minimum, panel_width)
            case Int8Linear():
                group_size = int8_group
                self.quant_type = QUANT_TYPES[torch.int8]
                scale = layer.scale
                # In chunks of rows, because torch converts all values to int32 before it sums.
                sums = [rows.sum(dim=1, dtype=torch.int32) for rows in weight.split(1024)]
                compensation = -zero_point * torch.cat(sums)
            case _:
                group_size = 1
                self.quant_type = QUANT_TYPES[weight.dtype]
        self.library = library
        panels, tail_panel = pack(weight, panel_width, group_size)
        buffers = {"weight": panels, "tail_panel": tail_panel, "scale": scale, "minimum": minimum}
        for name, tensor in (buffers | {"compensation": compensation}).items():
            self.register_buffer(name, tensor)
        self.bias = getattr(layer, "bias", None)
        if self.bias is not None:
            self.bias.data = self.bias.data.float()

    def struct(self) -> LinearStruct:
        """Return the layer's C struct. It holds addresses, so the tensors must not move."""
        tensors = (
            self.weight,
            self.tail_panel,
            self.scale,
            self.minimum,
            self.compensation,
            self.bias,
        )
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        sizes = self.out_features, self.in_features, self.out_features
        return LinearStruct(*addresses, *sizes, self.quant_type, self.scale_type, self.adapters)

    def set_adapters(self, pairs: list[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Set the LoRA adapters of this layer, by index: A and B, or None if it has none."""
        self.packed = [pair and (pair[0].contiguous(), pair[1].t().contiguous()) for pair in pairs]
        structs = [
            AdapterStruct(a.data_ptr(), b.data_ptr(), len(a))
            for a, b in (pair or (torch.empty(0), torch.empty(0)) for pair in self.packed)
        ]
        self.adapters = (AdapterStruct * len(structs))(*structs) if structs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `F.linear`, or `Int8Linear` or `BlockLinear` bit for bit.

        x: (..., in_features), float32, contiguous or not. Raises ValueError for any other input.
        """
        rows = math.prod(x.shape[:-1])
        x2d = x.reshape(rows, x.shape[-1]).contiguous()
        y = torch.empty(rows, self.out_features)
        values = torch.empty(rows, self.in_features + 32, dtype=torch.int16)  # quantised x
        x_scale = torch.empty(rows)
        threads = torch.get_num_threads()
        rotated = torch.empty(0 if self.scale is None else threads * self.in_features)
        self.library.linear(
            ctypes.byref(self.struct()),
            ctypes.c_int64(rows),
            ctypes.c_void_p(address(x2d, torch.float32, rows, self.in_features)),
            *(ctypes.c_void_p(each.data_ptr()) for each in (values, x_scale, rotated, y)),
            ctypes.c_int(threads),
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

    All other 16-bit weights become float32, so torch runs the remaining layers in float32. The
    model's adapters are attached to the new layers. Raises ValueError if the layers are native
    already, or for weights that C cannot read.
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
            if isinstance(layer, nn.Linear | Int8Linear | BlockLinear) and layer is not embedding:
                setattr(module, name, native_layer(layer))
    model.set_submodule(model.path("embedding"), NativeEmbedding(native_layer(embedding)))
    model.float()
    if model.adapters:
        model.adapters.attach(model)


def check_layer(layer: nn.Module, out: int, size: int) -> None:
    """Raise ValueError if C cannot read a layer with `out` outputs and `size` inputs."""
    match layer:
        case BlockLinear(block_format=block_format):
            count = -(-size // BLOCK_SIZE)
            width = count * BLOCK_SIZE * block_format.bits // 8
            address(layer.weight, torch.int8 if block_format.bits == 8 else torch.uint8, out, width)
            address(layer.scale, block_format.dtype, out, count)
            address(layer.minimum, block_format.dtype, out, count)
            address(layer.bias, torch.float32, out)
        case Int8Linear():
            address(layer.weight, torch.int8, out, size)
            address(layer.scale, torch.float32, out)
            address(layer.bias, torch.float32, out)
        case nn.Linear() | nn.Embedding():
            float_address(layer.weight, out, size)
            address(getattr(layer, "bias", None), layer.weight.dtype, out)
        case _:
            raise ValueError(f"native code computes no layer of type {type(layer).__name__}")


def float_address(tensor: torch.Tensor | None, *shape: int) -> int | None:
    """Return `address` of a float32 tensor, or of a 16-bit one, which becomes float32 later."""
    dtype = getattr(tensor, "dtype", None)
    return address(tensor, dtype if dtype in FLOAT_DTYPES else torch.float32, *shape)


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
