"""Several adapters of one model, none of them merged: each row of a pass may have its own.

After Chen et al. 2023, "Punica: Multi-tenant LoRA serving" (2310.18547), and Sheng et al. 2023,
"S-LoRA: Serving thousands of concurrent LoRA adapters" (2311.03285).
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from errors import UserError

# Roles of layers that do not see each row of a pass once, in the order of the pass.
MERGE_ONLY_ROLES = ("head", "expert_gate", "expert_up", "expert_down")


class Adapters:
    """Adapters by name: they add B @ A @ x to what layers of a model give, whatever these are.

    lora_weights: of each adapter, what `read_adapter` returns. rows: in the pass that is computed,
    an adapter's name and the rows that have it; None: all of them. Raises UserError for layers of
    which an adapter must be merged.
    """

    def __init__(
        self, model, lora_weights: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
    ):
        self.names = list(lora_weights)
        self.device = model.device
        self.rows: list[tuple[str, torch.Tensor | None]] = []
        layers = self.layers = {}  # path of a layer -> name of an adapter -> A, B
        for name, weights in lora_weights.items():
            for weight, weights_ab in weights.items():
                path = weight.removesuffix(".weight")
                if model.role(weight) in MERGE_ONLY_ROLES:
                    raise UserError(f"adapter {name!r} changes {path}, so it can only be merged")
                layers.setdefault(path, {})[name] = weights_ab
        self.hooks = []
        self.attach(model)

    def attach(self, model) -> None:
        """Add to what the layers give that the model has now, in its dtype, and to no others."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for path, weights in self.layers.items():
            for name, weights_ab in weights.items():
                weights[name] = tuple(each.to(model.device, model.dtype) for each in weights_ab)
            add_lora = functools.partial(self.add_lora, weights)
            self.hooks.append(model.get_submodule(path).register_forward_hook(add_lora))

    @contextlib.contextmanager
    def activate(self, names: list[str], row_ranges: list[range] | None) -> Iterator[None]:
        """Do what `use_adapters` says, if one of the names is an adapter's."""
        if len(set(names)) == 1:
            self.rows = [(names[0], None)]
        else:
            rows = {}
            for name, row_range in zip(names, row_ranges, strict=True):
                rows.setdefault(name, []).extend(row_range)
            self.rows = [
                (name, torch.tensor(weights, device=self.device)) for name, weights in rows.items()
            ]
        try:
            yield
        finally:
            self.rows = []

    def add_lora(self, lora_weights: dict, layer, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        """A hook: what a layer gives with adapters. lora_weights: of this layer, by name.

        inputs: x, (..., in_features). y: what the layer gives without, (..., out_features).
        """
        (x,) = inputs
        for name, rows in self.rows:
            if name not in lora_weights:
                continue
            a, b = lora_weights[name]
            if rows is None:
                y = y + F.linear(F.linear(x, a), b)
            else:  # the thin products are for these rows together
                y = y.index_add(0, rows, F.linear(F.linear(x[rows], a), b))
        return y


def use_adapters(model, names: list[str], row_ranges: list[range] | None = None):
    """A context in which rows of a pass have adapters: those of row_ranges[i] have names[i].

    "": none. row_ranges: None, if all rows of the pass have one name; else the pass is one of (N)
    rows.
    """
    return model.adapters.activate(names, row_ranges) if any(names) else contextlib.nullcontext()


def check_adapter(model, name: str) -> None:
    """Raise UserError unless a model has an adapter of this name; "": none."""
    if name and name not in (names := model.adapters.names if model.adapters else []):
        raise UserError(f"there is no adapter {name!r}; there are: {', '.join(names) or 'none'}")
