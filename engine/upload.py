"""Upload of a step's integers to the device in one copy."""

import torch

from graphs import pack


def upload(parts: list[list[int] | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy lists and int64 tensors of integers to the device at once; return them as tensors."""
    packed = pack(parts, device).to(device, non_blocking=True)
    return packed.split([len(part) for part in parts])
