"""Runners that compute the whole forward pass of GPT-2, Llama and related models in C."""

import ctypes
from typing import NamedTuple

import torch
import torch.nn as nn

from cache import kv_cache_group_ids, stored_head_dim
from llama import LlamaConfig, local_rope_layers, rotary_embedding
from model import PassOutput, TorchRunner
from native import build, draw
from native.linear import NativeEmbedding, NativeLinear, address, replace_with_native_linear
from native.structs import INT, POINTER, ModelStruct, draft_head_struct, model_struct, struct
from quantisation.int8 import Int8Linear, load_weight_rows
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
    hidden=POINTER,
    states=POINTER,
)
CACHE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 3}  # of the KV cache, as in gpt.c


class FlatBatch(NamedTuple):
    """The spans of a batch, concatenated; all but adapters in the order of PassStruct."""

    pages: list[int]
    sliding_pages: list[int]
    tokens: list[int]
    positions: list[int]
    table_starts: list[int]  # for each token, the index where its span's page table begins
    logits_indices: list[int]  # the tokens whose logits are wanted
    adapters: list[str | None]  # of each token


class NativeSampler(TorchRunner):
    """A runner that samples in C; forward passes run in torch, with or without native layers."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def sample_batch(self, logits, sequences, generator=None) -> list[int]:
        return sample_batch(logits, sequences, generator, self)

    def draw(
        self,
        logits: torch.Tensor,
        params: list,
        positions: list[int],
        token_masks: list | None = None,
    ) -> list[int]:
        """Sample the next token of each row, as `draw.draw` does."""
        return draw.draw(self.library, logits, params, positions, token_masks)


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
        self.model = self.pack(model)
        self.adapters = None  # the model's adapters, as last passed to C
        # Without and with a separate KV cache group for sliding-window layers.
        self.group_ids = [kv_cache_group_ids(self.config, separate) for separate in (False, True)]
        self.layers = [group_arrays(group_ids) for group_ids in self.group_ids]
        self.rotary_embedding = []
        if isinstance(model.config, LlamaConfig):
            cpu = torch.device("cpu")
            self.rotary_embedding = [
                rotary_embedding(model.config, torch.float32, cpu, is_local)
                for is_local in sorted({False, *local_rope_layers(model.config)})
            ]
        # References that keep the memory of the tensors allocated.
        self.weights = list(model.state_dict().values())

    def pack(self, model) -> ModelStruct:
        """Pack the weights of a model, and return its C struct."""
        model_struct(model)  # checks every tensor before the first is packed
        replace_with_native_linear(model, self.library)
        return model_struct(model)

    def forward(self, model, cache, spans: list, keep: list[int]) -> PassOutput:
        if model.adapters is not self.adapters:
            self.set_adapters(model)
        return self.compute(cache.storages, spans, keep)

    def set_adapters(self, model) -> None:
        """Pass the model's LoRA adapters to C, in place of earlier ones."""
        self.adapters = model.adapters
        names, layers = (self.adapters.names, self.adapters.layers) if self.adapters else ([], {})
        for path, layer in model.named_modules():
            if isinstance(layer, NativeLinear):
                pairs = layers.get(path, {})
                layer.set_adapters([pairs.get(name) for name in names] if pairs else [])
        self.model = model_struct(model)

    def compute(self, storages: list[torch.Tensor], spans: list, keep: list[int]) -> PassOutput:
        """Return the output at the last keep[i] positions of span i.

        Needs at least one token. storages: keys and values, (n_layer, 2, num_pages, n_kv_head,
        page_size, stored_head_dim), float32, float16 or int8. A single storage holds all layers.
        With two, the first holds full-attention layers and the second sliding-window layers. Raises
        ValueError, before anything changes, for tokens, positions or pages out of range and for
        storages that C cannot read.
        """
        batch = flatten_spans(spans, keep, storages[0].shape[4], len(storages) > 1)
        return self.run_pass(self.pass_struct(storages, batch))

    def pass_struct(self, storages: list[torch.Tensor], batch: FlatBatch) -> PassStruct:
        """Check a batch and its storages, and return their C struct."""
        config = self.config
        separate = len(storages) > 1
        num_pages = [storage.shape[2] for storage in storages]
        length = max(batch.positions) + 1
        limits = [
            ("tokens", batch.tokens, config.vocab_size),
            *(("pages", *pair) for pair in zip((batch.pages, batch.sliding_pages), num_pages)),
            ("positions", [length - 1], config.block_size),
        ]
        for name, numbers, limit in limits:
            if min(numbers) < 0 or max(numbers) >= limit:
                raise ValueError(f"{name} {numbers}: must be from 0 to {limit - 1}")
        group_ids = self.group_ids[separate][: self.model.n_layer]
        dtype = storages[0].dtype if storages[0].dtype in CACHE_DTYPES else torch.float32
        page_size = storages[0].shape[4]
        width = stored_head_dim(config.head_dim, dtype)
        caches = []
        for group_id, storage in enumerate(storages):
            shape = group_ids.count(group_id), 2, storage.shape[2], config.n_kv_head, page_size
            caches.append(address(storage, dtype, *shape, width))
        page_table, sliding_page_table, *arrays = (
            (INT * len(numbers))(*numbers) for numbers in batch[:-1]
        )
        groups = tuple(caches), (page_table, sliding_page_table), tuple(num_pages)
        angles = [table for each in self.rotary_embedding for table in each.cos_sin(length)]
        angles = (
            address(table, torch.float32, length, 1, self.model.rotary_dim) for table in angles
        )
        sizes = page_size, len(batch.tokens), len(batch.logits_indices)
        struct = PassStruct(*groups, *sizes, *self.layers[separate], *arrays, *angles)
        struct.cache_dtype = CACHE_DTYPES[dtype]
        if any(batch.adapters):
            names = self.adapters.names
            lora_ids = [names.index(name) if name else -1 for name in batch.adapters]
            struct.lora_ids = (INT * len(lora_ids))(*lora_ids)
        return struct

    def run_pass(self, struct: PassStruct) -> PassOutput:
        """Run the forward pass in C."""
        model = ctypes.byref(self.model)
        threads = torch.get_num_threads()
        # Scratch is not shared between calls, because ctypes releases the GIL during the call.
        work = torch.empty(self.library.work_floats(model, INT(struct.T), threads))
        logits = torch.empty(struct.num_logits, self.model.head.out_features)
        hidden = torch.empty(struct.num_logits, self.config.n_embd)
        struct.hidden = hidden.data_ptr()
        buffers = POINTER(logits.data_ptr()), POINTER(work.data_ptr())
        self.library.gpt_pass(model, ctypes.byref(struct), *buffers, threads)
        return PassOutput(logits, hidden)


class NativeHeadRunner(NativeRunner):
    """A runner that computes the passes of a draft head of a native target in C.

    Its weights are int8, whatever the target's are. Rounding can change drafts, but no output.
    """

    def pack(self, head) -> ModelStruct:
        embedding, norm, lm_head = head.target_layers
        if not isinstance(embedding, NativeEmbedding):
            raise ValueError("a native draft head requires a native target")
        if isinstance(lm_head, NativeLinear):
            raise ValueError("the layers of this draft head are native already")
        head.float()
        for name, layer in list(head.named_modules()):
            if isinstance(layer, nn.Linear):
                head.set_submodule(name, self.int8_layer(layer))
        head.target_layers = embedding, norm, self.int8_layer(lm_head)
        return draft_head_struct(head)

    def int8_layer(self, layer: nn.Linear) -> NativeLinear:
        """Return a layer with its weight rotated, quantised and packed."""
        quantised = Int8Linear(layer)
        load_weight_rows(quantised.state_dict(), "weight", slice(None), layer.weight.detach())
        return NativeLinear(quantised, self.library)

    def forward(self, head, cache, spans: list, states: torch.Tensor) -> PassOutput:
        batch = flatten_spans(spans, [1] * len(spans), cache.storages[0].shape[4], False)
        struct = self.pass_struct(cache.storages, batch)
        struct.states = address(states, torch.float32, struct.T, self.config.n_embd)
        logits, hidden = self.run_pass(struct)
        return PassOutput(head.scatter(logits), hidden)


def flatten_spans(spans: list, keep: list[int], page_size: int, separate: bool) -> FlatBatch:
    """Concatenate the spans of a batch.

    separate: whether sliding-window layers have pages of their own. Raises ValueError for a span
    that does not fit in its pages, or with fewer tokens than logits.
    """
    all_pages, all_sliding_pages, all_tokens, all_positions = [], [], [], []
    table_starts, logits_indices, adapters = [], [], []
    for (pages, start, tokens, sliding_pages, adapter), count in zip(spans, keep, strict=True):
        positions = range(start, start + len(tokens))
        capacity = min(len(pages), len(sliding_pages)) if separate else len(pages)
        if start < 0 or positions.stop > capacity * page_size:
            size = capacity * page_size
            raise ValueError(
                f"{len(tokens)} tokens from start {start}: must fit in {size} positions"
            )
        if not 0 <= count <= len(tokens):
            raise ValueError(
                f"keep {count}: must be from 0 to the number of tokens ({len(tokens)})"
            )
        table_starts += [len(all_pages)] * len(tokens)
        all_pages += pages[:capacity]
        all_sliding_pages += sliding_pages[:capacity]
        all_tokens += tokens
        all_positions += positions
        adapters += [adapter] * len(tokens)
        logits_indices += range(len(all_tokens) - count, len(all_tokens))
    lists = all_pages, all_sliding_pages, all_tokens, all_positions, table_starts, logits_indices
    return FlatBatch(*lists, adapters)


def group_arrays(group_ids: list[int]) -> tuple[ctypes.Array, ctypes.Array]:
    """Return the KV cache group of each layer and the layer's index in it, as C arrays."""
    group_indices = [group_ids[:layer].count(group_id) for layer, group_id in enumerate(group_ids)]
    return tuple((INT * len(group_ids))(*numbers) for numbers in (group_ids, group_indices))
