"""A decode step of GPT-2 or Llama in C."""

import ctypes

import torch

from cache import KVCache, Span
from llama import Llama, rotations
from model import TorchRunner
from native import build
from native.linear import address, native_layers
from native.structs import INT, POINTER, model_struct, struct

PassStruct = struct(
    "PassStruct",
    cache=POINTER,
    **dict.fromkeys(("num_pages", "page_size", "token", "position"), INT),
    pages=ctypes.POINTER(INT),
    cos=POINTER,
    sin=POINTER,
)


class NativeRunner(TorchRunner):
    """Computes the passes of one token of one model in C, and with torch all others.

    The model's weights are packed, in place: what is loaded or moved later is not seen, and the
    model cannot be copied or pickled.

    target: as in `build.load`. Raises BuildError without compiled code, ValueError as
    `model_struct`.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config = model.config
        self.library = build.load() if target is None else build.load(target)  # one cache key
        self.library.work_floats.restype = INT
        model_struct(model)  # each tensor is checked before the first is packed
        native_layers(model, self.library)
        self.model = model_struct(model)
        self.rotations = None
        if isinstance(model, Llama):
            self.rotations = rotations(model.config, torch.float32, torch.device("cpu"))
        # Kept, so that their memory goes to nothing else.
        self.weights = list(model.state_dict().values())

    def logits(self, model, cache, spans: list[Span], keep: list[int]) -> torch.Tensor:
        if len(spans) > 1 or len(spans[0].tokens) > 1 or not isinstance(cache, KVCache):
            return super().logits(model, cache, spans, keep)
        return self.compute(cache.storage, spans[0])

    def compute(self, storage: torch.Tensor, span: Span) -> torch.Tensor:
        """The logits after a span of one token, (1, vocab_size).

        storage: keys and values, (n_layer, 2, num_pages, n_kv_head, page_size, head_dim).
        Raises ValueError, before anything changes, for what C must not touch.
        """
        config = self.config
        num_pages = storage.shape[2]
        page_size = storage.shape[4]
        shape = self.model.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim
        cache = address(storage, torch.float32, *shape)
        pages, position, (token,) = span
        limits = {
            "tokens": ([token], config.vocab_size),
            "pages": (pages, num_pages),
            "positions": ([position], min(config.block_size, len(pages) * page_size)),
        }
        for name, (numbers, limit) in limits.items():
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} are {numbers}; they are from 0 to {limit - 1}")
        pages = (INT * len(pages))(*pages)
        shape = position + 1, 1, config.head_dim
        angles = self.rotations.first(position + 1) if self.rotations else ()
        angles = (address(table, torch.float32, *shape) for table in angles)
        job = PassStruct(cache, num_pages, page_size, token, position, pages, *angles)
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Room for each call its own: ctypes lets other threads of Python run meanwhile.
        work = torch.empty(self.library.work_floats(model, INT(position + 1), threads))
        logits = torch.empty(1, config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(job), *buffers, threads)
        return logits
