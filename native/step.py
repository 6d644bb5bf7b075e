"""Runners that compute the whole forward pass of GPT-2, Llama and related models in C."""

import ctypes
from typing import NamedTuple

import torch

from llama import Llama, local_rope_layers, rotary_embedding
from model import TorchRunner
from native import build, draw
from native.linear import address, replace_with_native_linear
from native.structs import INT, POINTER, model_struct, struct
from sampling import sample_batch

PassStruct = struct(
    "PassStruct",
    cache=POINTER,
    **dict.fromkeys(("num_pages", "page_size", "length", "T", "num_logits"), INT),
    **dict.fromkeys(
        ("tokens", "positions", "page_tables", "table_starts", "logits_indices"),
        ctypes.POINTER(INT),
    ),
    cos=POINTER,
    sin=POINTER,
    local_cos=POINTER,
    local_sin=POINTER,
)


class FlatBatch(NamedTuple):
    """The spans of a batch, concatenated, in the order of PassStruct."""

    tokens: list[int]
    positions: list[int]
    pages: list[int]
    table_starts: list[int]  # for each token, the index where its span's page table begins
    logits_indices: list[int]  # the tokens whose logits are wanted


class NativeSampler(TorchRunner):
    """A runner that samples in C; forward passes run in torch, with or without native layers."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def sample_batch(self, logits, sequences, generator=None) -> list[int]:
        return sample_batch(logits, sequences, generator, self)

    def draw(self, logits: torch.Tensor, params: list, positions: list[int]) -> list[int]:
        """Sample the next token of each row, as `draw.draw` does."""
        return draw.draw(self.library, logits, params, positions)


class NativeRunner(NativeSampler):
    """A runner that computes the forward passes of one model and samples in C.

    The model's weights are packed in place. C does not see weights that are loaded or moved later,
    and the model cannot be copied or pickled.

    target: as in `build.load`. Raises BuildError if the build fails, ValueError as
    `model_struct` does.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config = model.config
        # load() and load(None) are different keys for functools.cache.
        super().__init__(build.load() if target is None else build.load(target))
        self.library.work_floats.restype = INT
        model_struct(model)  # checks every tensor before the first is packed
        replace_with_native_linear(model, self.library)
        self.model = model_struct(model)
        self.rotary_embedding = []
        if isinstance(model, Llama):
            cpu = torch.device("cpu")
            self.rotary_embedding = [
                rotary_embedding(model.config, torch.float32, cpu, is_local)
                for is_local in sorted({False, *local_rope_layers(model.config)})
            ]
        # References that keep the memory of the tensors allocated.
        self.weights = list(model.state_dict().values())

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        return self.compute(cache.storage, spans, keep)

    def compute(self, storage: torch.Tensor, spans: list, keep: list[int]) -> torch.Tensor:
        """Return the logits at the last keep[i] positions of span i, (sum of keep, vocab_size).

        Needs at least one token. storage: keys and values, (n_layer, 2, num_pages, n_kv_head,
        page_size, head_dim), float32. Raises ValueError, before anything changes, for tokens,
        positions or pages out of range and for a storage that C cannot read.
        """
        batch = flatten_spans(spans, keep, storage.shape[4])
        return self.run_pass(self.pass_struct(storage, batch))

    def pass_struct(self, storage: torch.Tensor, batch: FlatBatch) -> PassStruct:
        """Check a batch and its storage, and return their C struct."""
        config = self.config
        num_pages, page_size = storage.shape[2], storage.shape[4]
        length = max(batch.positions) + 1
        limits = [
            ("tokens", batch.tokens, config.vocab_size),
            ("pages", batch.pages, num_pages),
            ("positions", [length - 1], config.block_size),
        ]
        for name, numbers, limit in limits:
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} {numbers}: must be from 0 to {limit - 1}")
        shape = self.model.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim
        cache = address(storage, torch.float32, *shape)
        arrays = ((INT * len(numbers))(*numbers) for numbers in batch)
        angles = [table for each in self.rotary_embedding for table in each.cos_sin(length)]
        angles = (address(table, torch.float32, length, 1, config.head_dim) for table in angles)
        sizes = num_pages, page_size, length, len(batch.tokens), len(batch.logits_indices)
        return PassStruct(cache, *sizes, *arrays, *angles)

    def run_pass(self, struct: PassStruct) -> torch.Tensor:
        """Run the forward pass in C and return its logits."""
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Scratch is not shared between calls, because ctypes releases the GIL during the call.
        sizes = INT(struct.T), INT(struct.length)
        work = torch.empty(self.library.work_floats(model, *sizes, threads))
        logits = torch.empty(struct.num_logits, self.config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(struct), *buffers, threads)
        return logits


def flatten_spans(spans: list, keep: list[int], page_size: int) -> FlatBatch:
    """Concatenate the spans of a batch.

    Raises ValueError for a span that does not fit in its pages, or with fewer tokens than logits.
    """
    all_tokens, all_positions, all_pages = [], [], []
    table_starts, logits_indices = [], []
    for (pages, start, tokens), count in zip(spans, keep, strict=True):
        positions = range(start, start + len(tokens))
        size = len(pages) * page_size
        if start < 0 or positions.stop > size:
            raise ValueError(
                f"{len(tokens)} tokens from start {start}: must fit in {size} positions"
            )
        if not 0 <= count <= len(tokens):
            raise ValueError(
                f"keep {count}: must be from 0 to the number of tokens ({len(tokens)})"
            )
        table_starts += [len(all_pages)] * len(tokens)
        all_pages += pages
        all_tokens += tokens
        all_positions += positions
        logits_indices += range(len(all_tokens) - count, len(all_tokens))
    return FlatBatch(all_tokens, all_positions, all_pages, table_starts, logits_indices)
