"""Weights packed for gpt.c."""

import ctypes

import torch


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
