"""Quantised weights: int8 with a scale per row, and blocks as in GGUF files."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from quantisation.blocks import BlockEmbedding, load_block_rows, replace_with_block_linear
from quantisation.int8 import Int8Embedding, load_weight_rows, replace_with_int8_linear


class Quantisation(NamedTuple):
    """The layers and the storage of a model whose weights have some dtype.

    replace_layers(model, formats): puts uninitialised layers in place; formats: as in
    `replace_with_block_linear`. load_rows: writes rows of a weight, like `load_weight_rows`.
    """

    label: str  # for messages
    embedding: type | None
    replace_layers: Callable
    load_rows: Callable


FLOAT = Quantisation("float weights", None, lambda model, formats: model, load_weight_rows)
INT8 = Quantisation(
    "int8 weights",
    Int8Embedding,
    lambda model, formats: replace_with_int8_linear(model),
    load_weight_rows,
)
BLOCKS = Quantisation(
    "weights in blocks", BlockEmbedding, replace_with_block_linear, load_block_rows
)


def quantisation_of(dtype: torch.dtype) -> Quantisation:
    """Return the quantisation that a weight dtype stands for, FLOAT for a floating-point dtype."""
    return {torch.int8: INT8, torch.uint8: BLOCKS}.get(dtype, FLOAT)
