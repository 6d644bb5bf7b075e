"""Unmerged LoRA adapters of one model, selected for each row of a batch.

After Chen et al. 2023, "Punica: Multi-tenant LoRA serving" (2310.18547), and Sheng et al. 2023,
"S-LoRA: Serving thousands of concurrent LoRA adapters" (2311.03285).
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from errors import UserError

# Roles of layers whose input rows are not the rows of the batch, each once and in order.
MERGE_ONLY_ROLES = ("head", "expert_gate", "expert_up", "expert_down")


class Adapters:
    """LoRA adapters by name, which add B @ A @ x to the outputs of layers of any type.

    lora_weights: adapter name -> result of `read_adapter`. rows: for the current pass, pairs of an
    adapter name and the indices of its rows (None: all rows). Raises UserError for layers whose
    adapters must be merged.
    """

    def __init__(
        self, model, lora_weights: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
    ):
        self.names = list(lora_weights)
        self.rows: list[tuple[str, torch.Tensor | None]] = []
        layers = self.layers = {}  # layer path -> adapter name -> (A, B)
        for name, weights in lora_weights.items():
            for weight_name, ab in weights.items():
                path = weight_name.removesuffix(".weight")
                if model.role(weight_name) in MERGE_ONLY_ROLES:
                    raise UserError(f"adapter {name!r} changes {path}: merge it with --adapter")
                layers.setdefault(path, {})[name] = ab
        self.hooks = []
        self.attach(model)

    def attach(self, model) -> None:
        """Move the hooks to the model's current layers, and the weights to its device and dtype."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for path, weights in self.layers.items():
            for name, ab in weights.items():
                weights[name] = tuple(matrix.to(model.device, model.dtype) for matrix in ab)
            add_lora = functools.partial(self.add_lora, weights)
            self.hooks.append(model.get_submodule(path).register_forward_hook(add_lora))

    @contextlib.contextmanager
    def activate(self, rows: list[tuple[str, torch.Tensor | None]]) -> Iterator[None]:
        """Select adapters within the context. rows: of each adapter; None: all."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = []

    def add_lora(self, lora_weights: dict, layer, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer with its adapters added, as a forward hook.

        lora_weights: adapter name -> (A, B) of this layer. inputs: (x,), (..., in_features).
        y: output of the base layer, (..., out_features).
        """
        (x,) = inputs
        for name, rows in self.rows:
            if name not in lora_weights:
                continue
            a, b = lora_weights[name]
            if rows is None:
                y = y + F.linear(F.linear(x, a), b)
            else:  # one pair of small products for all rows of an adapter
                y = y.index_add(0, rows, F.linear(F.linear(x[rows], a), b))
        return y


def use_adapters(model, names: list[str], row_ranges: list[range] | None = None):
    """Return a context in which the rows row_ranges[i] of a pass use the adapter names[i].

    The name "" means no adapter. row_ranges may be None if all names are equal; otherwise the
    tokens of the pass must be flattened, (N).
    """
    if not any(names):
        return contextlib.nullcontext()
    rows = rows_by_adapter(names, row_ranges)
    pairs = [(name, torch.tensor(each, device=model.device)) for name, each in rows.items()]
    return model.adapters.activate(pairs or [(names[0], None)])


def rows_by_adapter(names: list[str], row_ranges: list[range] | None) -> dict[str, list[int]]:
    """Return adapter name -> its rows of a pass; {} if all rows have one name."""
    rows = {}
    if len(set(names)) > 1:
        for name, row_range in zip(names, row_ranges, strict=True):
            rows.setdefault(name, []).extend(row_range)
    return rows


def check_adapter(model, name: str) -> None:
    """Raise UserError unless the model has an adapter of this name or the name is ""."""
    if name and name not in (names := model.adapters.names if model.adapters else []):
        if not names:
            raise UserError(f"adapter {name!r} is unknown: the model has no adapters")
        raise UserError(f"adapter {name!r}: must be one of: {', '.join(names)}")
