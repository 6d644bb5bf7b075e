"""Weights packed as gpt.c reads them."""

import ctypes

import torch


class LinearStruct(ctypes.Structure):
    """The struct Linear of gpt.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "rest", "bias")),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features")),
    ]


def pack(weight: torch.Tensor, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a weight (out, in) into panels of `outputs` outputs, where it lies.

    Returns the whole panels, (out // outputs, in, outputs), and one panel more for the outputs left
    over, filled up with zeros.
    """
    whole = len(weight) - len(weight) % outputs
    panels = weight[:whole].view(whole // outputs, weight.shape[1], outputs)
    for panel, rows in zip(panels, weight.split(outputs)):  # they share their memory
        panel.copy_(rows.clone().t())
    rest = weight.new_zeros(weight.shape[1], outputs)
    rest[:, : len(weight) - whole] = weight[whole:].t()
    return panels, rest
