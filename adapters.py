"""Unmerged LoRA adapters of one model, one of them selected for each pass."""

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

    lora_weights: adapter name -> result of `read_adapter`. name: the adapter of the current pass;
    "": none. Raises UserError for layers whose adapters must be merged.
    """

    def __init__(
        self, model, lora_weights: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
    ):
        self.names = list(lora_weights)
        self.name = ""
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
    def activate(self, names: list[str]) -> Iterator[None]:
        """Select an adapter within the context; names as in `use_adapters`."""
        (self.name,) = set(names)
        try:
            yield
        finally:
            self.name = ""

    def add_lora(self, lora_weights: dict, layer, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer with the pass's adapter added, as a forward hook.

        lora_weights: adapter name -> (A, B) of this layer. inputs: (x,), (..., in_features).
        y: output of the base layer, (..., out_features).
        """
        if self.name not in lora_weights:
            return y
        (x,) = inputs
        a, b = lora_weights[self.name]
        return y + F.linear(F.linear(x, a), b)


def use_adapters(model, names: list[str]):
    """Return a context in which a pass uses the adapter that all of these names are.

    The name "" means no adapter.
    """
    return model.adapters.activate(names) if any(names) else contextlib.nullcontext()


def check_adapter(model, name: str) -> None:
    """Raise UserError unless the model has an adapter of this name or the name is ""."""
    if name and name not in (names := model.adapters.names if model.adapters else []):
        if not names:
            raise UserError(f"adapter {name!r} is unknown: the model has no adapters")
        raise UserError(f"adapter {name!r}: must be one of: {', '.join(names)}")
