"""Runners that compute a decode step of GPT-2 and Llama in C."""

import ctypes

import torch

from cache import KVCache, Span
from llama import Llama, rotary_embedding
from model import TorchRunner
from native import build
from native.linear import address, replace_with_native_linear
from native.structs import INT, POINTER, model_struct, struct

PassStruct = struct(
    "PassStruct",
    cache=POINTER,
    **dict.fromkeys(("num_pages", "page_size", "token", "position"), INT),
    page_table=ctypes.POINTER(INT),
    cos=POINTER,
    sin=POINTER,
)


class NativeRunner(TorchRunner):
    """A runner that computes passes of one token of one model in C, and all others in torch.

    The model's weights are packed in place. C does not see weights that are loaded or moved later,
    and the model cannot be copied or pickled.

    target: as in `build.load`. Raises BuildError if the build fails, ValueError as
    `model_struct` does.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config = model.config
        # load() and load(None) are different keys for functools.cache.
        self.library = build.load() if target is None else build.load(target)
        self.library.work_floats.restype = INT
        model_struct(model)  # checks every tensor before the first is packed
        replace_with_native_linear(model, self.library)
        self.model = model_struct(model)
        self.rotary_embedding = None
        if isinstance(model, Llama):
            cpu = torch.device("cpu")
            self.rotary_embedding = rotary_embedding(model.config, torch.float32, cpu)
        # References that keep the memory of the tensors allocated.
        self.weights = list(model.state_dict().values())

    def logits(self, model, cache, spans: list[Span], keep: list[int]) -> torch.Tensor:
        if len(spans) > 1 or len(spans[0].tokens) > 1 or not isinstance(cache, KVCache):
            return super().logits(model, cache, spans, keep)
        return self.compute(cache.storage, spans[0])

    def compute(self, storage: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the logits after a span of one token, (1, vocab_size).

        storage: keys and values, (n_layer, 2, num_pages, n_kv_head, page_size, head_dim), float32.
        Raises ValueError, before anything changes, for a token, position or pages out of range and
        for a storage that C cannot read.
        """
        return self.run_pass(self.pass_struct(storage, span))

    def pass_struct(self, storage: torch.Tensor, span: Span) -> PassStruct:
        """Check a span of one token and its storage, and return their C struct."""
        config = self.config
        num_pages, page_size = storage.shape[2], storage.shape[4]
        pages, position, (token,) = span
        limits = [
            ("tokens", [token], config.vocab_size),
            ("pages", pages, num_pages),
            ("positions", [position], min(config.block_size, len(pages) * page_size)),
        ]
        for name, numbers, limit in limits:
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} {numbers}: must be from 0 to {limit - 1}")
        shape = self.model.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim
        cache = address(storage, torch.float32, *shape)
        page_table = (INT * len(pages))(*pages)
        length = position + 1
        angles = self.rotary_embedding.cos_sin(length) if self.rotary_embedding else ()
        angles = (address(table, torch.float32, length, 1, config.head_dim) for table in angles)
        return PassStruct(cache, num_pages, page_size, token, position, page_table, *angles)

    def run_pass(self, struct: PassStruct) -> torch.Tensor:
        """Run the forward pass in C and return its logits."""
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Scratch is not shared between calls, because ctypes releases the GIL during the call.
        length = INT(struct.position + 1)
        work = torch.empty(self.library.work_floats(model, length, threads))
        logits = torch.empty(1, self.config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(struct), *buffers, threads)
        return logits
