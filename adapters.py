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
MERGED = ("head", "expert_gate", "expert_up", "expert_down")


class Adapters:
    """Adapters by name: they add B @ A @ x to what layers of a model give, whatever these are.

    pairs: of each adapter, what `read_adapter` returns. rows: in the pass that is computed, an
    adapter's name and the rows that have it; None: all of them.
    Raises UserError for layers of which an adapter must be merged.
    """

    def __init__(self, model, pairs: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]):
        self.names = list(pairs)
        self.device = model.device
        self.rows: list[tuple[str, torch.Tensor | None]] = []
        layers = self.layers = {}  # path of a layer -> name of an adapter -> A, B
        for name, own in pairs.items():
            for weight, pair in own.items():
                path = weight.removesuffix(".weight")
                if model.role(weight) in MERGED:
                    raise UserError(f"adapter {name!r} changes {path}, so it can only be merged")
                layers.setdefault(path, {})[name] = pair
        self.hooks = []
        self.attach(model)

    def attach(self, model) -> None:
        """Add to what the layers give that the model has now, in its dtype, and to no others."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for path, own in self.layers.items():
            for name, pair in own.items():
                own[name] = tuple(each.to(model.device, model.dtype) for each in pair)
            add = functools.partial(self.add, own)
            self.hooks.append(model.get_submodule(path).register_forward_hook(add))

    @contextlib.contextmanager
    def on(self, names: list[str], parts: list[range] | None) -> Iterator[None]:
        """Do what `adapted` says, if one of the names is an adapter's."""
        if len(set(names)) == 1:
            self.rows = [(names[0], None)]
        else:
            rows = {}
            for name, part in zip(names, parts, strict=True):
                rows.setdefault(name, []).extend(part)
            self.rows = [
                (name, torch.tensor(own, device=self.device)) for name, own in rows.items()
            ]
        try:
            yield
        finally:
            self.rows = []

    def add(self, pairs: dict, layer, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        """A hook: what a layer gives with adapters. pairs: of this layer, by name.

        inputs: x, (..., in_features). y: what the layer gives without, (..., out_features).
        """
        (x,) = inputs
        for name, rows in self.rows:
            if name not in pairs:
                continue
            a, b = pairs[name]
            if rows is None:
                y = y + F.linear(F.linear(x, a), b)
            else:  # the thin products are for these rows together
                y = y.index_add(0, rows, F.linear(F.linear(x[rows], a), b))
        return y


def adapted(model, names: list[str], parts: list[range] | None = None):
    """A context in which rows of a model's pass have adapters: those of parts[i] have names[i].

    "": none. parts: None, if all rows of the pass have one name; else the pass is one of (N) rows.
    """
    return model.adapters.on(names, parts) if any(names) else contextlib.nullcontext()


def check_adapter(model, name: str) -> None:
    """Raise UserError unless a model has an adapter of this name; "": none."""
    if name and name not in (names := model.adapters.names if model.adapters else []):
        raise UserError(f"there is no adapter {name!r}; there are: {', '.join(names) or 'none'}")
