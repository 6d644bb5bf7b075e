"""A whole pass of GPT-2, Llama or one of their relatives in C."""

import ctypes

import torch

from cache import kv_cache_group_ids, stored_head_dim
from llama import Llama, local_rope_layers, rotary_embedding
from model import TorchRunner
from native import build, draw
from native.linear import NativeLinear, address, replace_with_native_linear
from native.structs import INT, POINTER, model_struct, struct
from sampling import sample_batch

PassStruct = struct(
    "PassStruct",
    cache=POINTER * 2,
    page_tables=ctypes.POINTER(INT) * 2,
    num_pages=INT * 2,
    **dict.fromkeys(("page_size", "T", "num_logits"), INT),
    **dict.fromkeys(("group_ids", "group_indices"), ctypes.POINTER(INT)),
    **dict.fromkeys(("tokens", "positions", "table_starts", "logits_indices"), ctypes.POINTER(INT)),
    cos=POINTER,
    sin=POINTER,
    local_cos=POINTER,
    local_sin=POINTER,
    cache_dtype=INT,
    lora_ids=ctypes.POINTER(INT),
)
CACHE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 3}  # dtypes of a cache, as in gpt.c


class NativeSampler(TorchRunner):
    """Draws in C; torch computes the passes, in which native layers may compute the products."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def sample_batch(
        self, logits, params, sequences, prompt_lengths, generator=None, eos=(), token_masks=None
    ) -> list[int]:
        return sample_batch(
            logits, params, sequences, prompt_lengths, generator, eos, self, token_masks
        )

    def draw(
        self,
        logits: torch.Tensor,
        params: list,
        positions: list[int],
        token_masks: list | None = None,
    ) -> list[int]:
        """The next token of each row, as `draw.draw`."""
        return draw.draw(self.library, logits, params, positions, token_masks)


class NativeRunner(NativeSampler):
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
        replace_with_native_linear(model, self.library)
        self.model = model_struct(model)
        self.adapters = None  # those of the model that C knows
        # Without and with a storage of their own for layers with a window.
        self.group_ids = [kv_cache_group_ids(self.config, separate) for separate in (False, True)]
        self.layers = [group_arrays(group_ids) for group_ids in self.group_ids]
        self.rotary_embedding = []
        if isinstance(model, Llama):
            is_local = sorted(set(local_rope_layers(model.config)) | {False})
            cpu = torch.device("cpu")
            self.rotary_embedding = [
                rotary_embedding(model.config, torch.float32, cpu, local) for local in is_local
            ]
        # Kept, so that their memory goes to nothing else.
        self.weights = list(model.state_dict().values())

    def logits(self, model, cache, spans: list, keep: list[int]) -> torch.Tensor:
        if model.adapters is not self.adapters:
            self.set_adapters(model)
        return self.compute(cache.storages, spans, keep)

    def set_adapters(self, model) -> None:
        """Let C add what the adapters of a model do, and nothing that earlier ones did."""
        self.adapters = model.adapters
        names, layers = (self.adapters.names, self.adapters.layers) if self.adapters else ([], {})
        for path, layer in model.named_modules():
            if isinstance(layer, NativeLinear):
                pairs = layers.get(path, {})
                layer.set_adapters([pairs.get(name) for name in names] if pairs else [])
        self.model = model_struct(model)

    def compute(self, storages: list[torch.Tensor], spans: list, keep: list[int]) -> torch.Tensor:
        """The logits at the last keep[i] positions of span i, (sum of keep, vocab_size).

        There is at least one token. storages: keys and values, (n_layer, 2, num_pages, n_kv_head,
        page_size, stored_head_dim), of all layers; or of those that see all, then of those with a
        window. Their dtype is float32, float16 or int8.
        Raises ValueError, before anything changes, for tokens, positions, pages or storages that C
        must not touch.
        """
        config = self.config
        page_size = storages[0].shape[4]
        separate = len(storages) > 1
        group_ids = self.group_ids[separate][: self.model.n_layer]
        dtype = storages[0].dtype if storages[0].dtype in CACHE_DTYPES else torch.float32
        width = stored_head_dim(config.head_dim, dtype)
        caches = []
        for group_id, storage in enumerate(storages):
            shape = group_ids.count(group_id), 2, storage.shape[2], config.n_kv_head, page_size
            caches.append(address(storage, dtype, *shape, width))
        tokens = []
        positions = []
        pages = []  # of all spans
        sliding_pages = []
        table_starts = []  # where those of each token's span begin
        logits_indices = []
        lora_ids = []  # of each token's adapter, -1 for none
        for (span_pages, start, new, span_sliding_pages, adapter), count in zip(
            spans, keep, strict=True
        ):
            span_positions = range(start, start + len(new))
            capacity = (
                min(len(span_pages), len(span_sliding_pages)) if separate else len(span_pages)
            )
            if (
                start < 0
                or span_positions.stop > capacity * page_size
                or not 0 <= count <= len(new)
            ):
                room = f"{capacity} pages of {page_size}"
                raise ValueError(f"{len(new)} tokens from {start} on, {count} to keep, in {room}")
            table_starts += [len(pages)] * len(new)
            pages += span_pages[:capacity]
            sliding_pages += span_sliding_pages[:capacity]
            tokens += new
            positions += span_positions
            lora_ids += [self.adapters.names.index(adapter) if adapter else -1] * len(new)
            logits_indices += range(len(tokens) - count, len(tokens))
        length = max(positions) + 1
        page_tables = pages, sliding_pages
        num_pages = [storage.shape[2] for storage in storages]
        limits = [
            ("tokens", tokens, config.vocab_size),
            *(("pages", *pair) for pair in zip(page_tables, num_pages)),
            ("positions", [length - 1], config.block_size),
        ]
        for name, numbers, limit in limits:
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} are {numbers}; they are from 0 to {limit - 1}")
        lists = *page_tables, tokens, positions, table_starts, logits_indices
        page_table, sliding_page_table, *arrays = (
            (INT * len(numbers))(*numbers) for numbers in lists
        )
        groups = tuple(caches), (page_table, sliding_page_table), tuple(num_pages)
        angles = [table for each in self.rotary_embedding for table in each.cos_sin(length)]
        angles = (address(table, torch.float32, length, 1, config.head_dim) for table in angles)
        sizes = page_size, len(tokens), len(logits_indices)
        batch = PassStruct(*groups, *sizes, *self.layers[separate], *arrays, *angles)
        batch.cache_dtype = CACHE_DTYPES[dtype]
        if max(lora_ids) >= 0:
            batch.lora_ids = (INT * len(lora_ids))(*lora_ids)
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Room for each call its own: ctypes lets other threads of Python run meanwhile.
        floats = self.library.work_floats(model, INT(len(tokens)), threads)
        work = torch.empty(floats)
        logits = torch.empty(len(logits_indices), config.vocab_size)
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(batch), *buffers, threads)
        return logits


def group_arrays(group_ids: list[int]) -> tuple[ctypes.Array, ctypes.Array]:
    """The kinds of layers as C reads them, and the number of each among those of its kind."""
    group_indices = [group_ids[:layer].count(group_id) for layer, group_id in enumerate(group_ids)]
    return tuple((INT * len(group_ids))(*numbers) for numbers in (group_ids, group_indices))
