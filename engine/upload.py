"""Upload of a step's integers to the device in one copy."""

import torch


def upload(parts: list[list[int] | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy lists and int64 tensors of integers to the device at once; return a tensor of each."""
    parts = [torch.as_tensor(part, dtype=torch.int64) for part in parts]
    packed = torch.cat(parts)
    if device.type == "cuda":  # from pageable memory the copy itself would be a sync
        packed = packed.pin_memory()
    return packed.to(device, non_blocking=True).split([len(part) for part in parts])
