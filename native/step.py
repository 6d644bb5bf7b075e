"""A whole pass of GPT-2, Llama or one of their relatives in C."""

import ctypes

import torch

from llama import Llama, local_layers, rotations
from model import TorchRunner
from native import build, draw
from native.linear import address, native_layers
from native.structs import INT, POINTER, model_struct, struct
from sampling import choose

PassStruct = struct(
    "PassStruct",
    cache=POINTER,
    **dict.fromkeys(("num_pages", "page_size", "length", "T", "wanted"), INT),
    **dict.fromkeys(("tokens", "positions", "pages", "tables", "wants"), ctypes.POINTER(INT)),
    cos=POINTER,
    sin=POINTER,
    local_cos=POINTER,
    local_sin=POINTER,
)


class NativeDraws(TorchRunner):
    """Draws in C; torch computes the passes, in which native layers may compute the products."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def choose(self, logits, params, texts, prompt_lengths, generator=None) -> list[int]:
        return choose(logits, params, texts, prompt_lengths, generator, native=self)

    def draw(self, logits: torch.Tensor, params: list, positions: list[int]) -> list[int]:
        """The next token of each row, as `draw.draw`."""
        return draw.draw(self.library, logits, params, positions)


class NativeRunner(NativeDraws):
    """Computes the passes of one model in C, and draws in C.

    The model's weights are packed, in place: what is loaded or moved later is not seen, and the
    model cannot be copied or pickled.

    target: as in `build.load`. Raises BuildError without compiled code, ValueError as
    `model_struct`.
    """

    def __init__(self, model, target: tuple[str, ...] | None = None):
        self.config = model.config
        super().__init__(build.load() if target is None else build.load(target))  # one cache key
        self.library.work_floats.restype = INT
        model_struct(model)  # each tensor is checked before the first is packed
        native_layers(model, self.library)
        self.model = model_struct(model)
        self.rotations = []
        if isinstance(model, Llama):
            kinds = sorted(set(local_layers(model.config)) | {False})
            cpu = torch.device("cpu")
            self.rotations = [rotations(model.config, torch.float32, cpu, kind) for kind in kinds]
        # Kept, so that their memory goes to nothing else.
        self.weights = list(model.state_dict().values())

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        return self.compute(cache.storage, spans, keep)

    def compute(self, storage: torch.Tensor, spans: list, keep: list[int]) -> torch.Tensor:
        """The logits at the last keep[i] positions of span i, (sum of keep, vocab_size).

        There is at least one token. storage: keys and values, (n_layer, 2, num_pages, n_kv_head,
        page_size, head_dim).
        Raises ValueError, before anything changes, for tokens, positions, pages or a storage that C
        must not touch.
        """
        config = self.config
        num_pages = storage.shape[2]
        page_size = storage.shape[4]
        shape = self.model.n_layer, 2, num_pages, config.n_kv_head, page_size, config.head_dim
        cache = address(storage, torch.float32, *shape)
        tokens = []
        positions = []
        pages = []  # of all spans
        tables = []  # where those of each token's span begin
        wants = []
        for (own_pages, start, new), count in zip(spans, keep, strict=True):
            steps = range(start, start + len(new))
            if start < 0 or steps.stop > len(own_pages) * page_size or not 0 <= count <= len(new):
                room = f"{len(own_pages)} pages of {page_size}"
                raise ValueError(f"{len(new)} tokens from {start} on, {count} to keep, in {room}")
            tables += [len(pages)] * len(new)
            pages += own_pages
            tokens += new
            positions += steps
            wants += range(len(tokens) - count, len(tokens))
        length = max(positions) + 1
        limits = {
            "tokens": (tokens, config.vocab_size),
            "pages": (pages, num_pages),
            "positions": ([length - 1], config.block_size),
        }
        for name, (numbers, limit) in limits.items():
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} are {numbers}; they are from 0 to {limit - 1}")
        lists = tokens, positions, pages, tables, wants
        arrays = ((INT * len(numbers))(*numbers) for numbers in lists)
        angles = [table for each in self.rotations for table in each.first(length)]
        angles = (address(table, torch.float32, length, 1, config.head_dim) for table in angles)
        sizes = num_pages, page_size, length, len(tokens), len(wants)
        job = PassStruct(cache, *sizes, *arrays, *angles)
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Room for each call its own: ctypes lets other threads of Python run meanwhile.
        floats = self.library.work_floats(model, INT(len(tokens)), INT(length), threads)
        work = torch.empty(floats)
        logits = torch.empty(len(wants), config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(job), *buffers, threads)
        return logits
