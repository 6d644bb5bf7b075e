"""A whole pass of GPT-2 or Llama, in C."""

import ctypes
import itertools

import torch

from cache import KVCache
from llama import Llama, rotations
from native import build, draw
from native.linear import address, native_layers
from native.structs import INT, POINTER, model_struct, struct

PassStruct = struct(
    "PassStruct",
    cache=POINTER,
    **dict.fromkeys(("batch", "max_len", "T", "wanted"), INT),
    **dict.fromkeys(("tokens", "rows", "positions", "wants"), ctypes.POINTER(INT)),
    cos=POINTER,
    sin=POINTER,
)


class NativePass:
    """The passes of one model, in C.

    Its weights are packed, in place: what is loaded or moved later is not seen, and it cannot be
    copied or pickled.

    target: as in `build.load`. Raises BuildError without compiled code, ValueError as
    `model_struct`.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config = model.config
        self.library = build.load(target)
        self.library.work_floats.restype = INT
        model_struct(model)  # every tensor is checked before the first is packed
        native_layers(model, self.library)
        self.model = model_struct(model)
        self.rotations = None
        if isinstance(model, Llama):
            self.rotations = rotations(model.config, torch.float32, torch.device("cpu"))
        # Kept, so that their memory goes to nothing else.
        self.weights = list(model.state_dict().values())

    def logits(
        self, new: list[list[int]], rows: list[int], cache: KVCache, keep: int
    ) -> torch.Tensor:
        """As `infer.pass_logits`: (B, keep, vocab_size).

        Raises ValueError, before anything changes, for tokens, positions or a cache that C must not
        touch.
        """
        config = self.config
        batch, max_len = cache.storage.shape[2:5:2]
        lengths = [len(part) for part in new]
        refused = f"rows {rows} of {batch} with {lengths} new tokens, of which {keep} are to keep"
        if not all(0 <= row < min(batch, len(cache.tokens)) for row in rows):
            raise ValueError(refused)
        starts = cache.plan(new, rows)
        tokens = [token for part in new for token in part]
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise ValueError(f"tokens are {tokens}; they are from 0 to {config.vocab_size - 1}")
        if not all(1 <= keep <= length for length in lengths):
            raise ValueError(refused)
        row_of_token = [row for row, length in zip(rows, lengths) for _ in range(length)]
        positions = [start + i for start, length in zip(starts, lengths) for i in range(length)]
        last = max(positions)
        if last >= config.block_size:
            raise ValueError(f"position {last} is outside the window of {config.block_size}")
        ends = itertools.accumulate(lengths)
        wanted = [index for end in ends for index in range(end - keep, end)]
        arrays = ((INT * len(x))(*x) for x in (tokens, row_of_token, positions, wanted))
        shape = self.model.n_layer, 2, batch, config.n_kv_head, max_len, config.head_dim
        storage = address(cache.storage, torch.float32, *shape)
        tables = self.rotations.first(last + 1) if self.rotations else ()
        angles = (address(table, torch.float32, last + 1, 1, config.head_dim) for table in tables)
        job = PassStruct(storage, batch, max_len, len(tokens), len(wanted), *arrays, *angles)
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Room for each call its own: ctypes lets other threads of Python run meanwhile.
        floats = self.library.work_floats(model, INT(len(tokens)), INT(max_len), threads)
        work = torch.empty(floats)
        logits = torch.empty(len(new), keep, config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(job), *buffers, threads)
        cache.record()
        return logits

    def draw(self, rows: list[torch.Tensor], params: list, positions: list[int]) -> list[int]:
        """The next token of each row, as `draw.draw`."""
        return draw.draw(self.library, rows, params, positions)
