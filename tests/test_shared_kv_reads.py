"""Query heads that share a KV head read its keys and values once."""

import ctypes

import pytest
import torch
from conftest import TARGETS, random_tokens
from natives import in_passes, native, threads

SHARING = [
    {"sliding_windows": (40, None), "n_kv_head": 1},
    {"sliding_windows": (None, 33), "n_head": 6, "n_kv_head": 2, "head_dim": 64},
]


def unshared(model):
    """A copy of a Llama in which each query head has a KV head of its own."""
    from dataclasses import replace

    config = replace(model.config, n_kv_head=model.config.n_head)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (-1, config.head_dim))
            copies = config.n_head // model.config.n_kv_head
            weights[name] = heads.repeat_interleave(copies, dim=0).flatten(0, 1)
    copied = type(model)(config)
    copied.load_state_dict(weights)
    return copied.eval()


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_a_thread_has_room_for_the_queries_of_a_group(tiny_llama, library, n_kv_head):
    """And for their largest scores and sums, beside one block of keys and values."""
    model = native(tiny_llama(dtype=torch.float32, n_head=6, n_kv_head=n_kv_head, head_dim=10))
    struct = model.runner.model
    width = ctypes.c_int.in_dll(library, "panel_width").value // 2

    def floats(threads: int) -> int:
        function = library.work_floats
        function.restype = ctypes.c_int64
        return function(ctypes.byref(struct), ctypes.c_int64(16), threads)

    room = floats(2) - floats(1) - struct.max_width
    assert room == 2 * 32 * 10 + 6 // n_kv_head * (10 + 2) * width


@torch.inference_mode()
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("form", SHARING, ids=str)
def test_still_heads_together_have_the_bits_of_each_alone(tiny_windows, target, compiled, form):
    """For any chunks, pages and threads: with 8, heads of a group go to different threads."""
    model = tiny_windows(dtype=torch.float32, block_size=100, **form)
    texts = [random_tokens(100, seed=row) for row in range(2)]
    alone = in_passes(native(unshared(model), target), texts, [[100, 100]], 16)
    native(model, target)
    for page_size in (7, 32):
        for count in (1, 2, 3, 8):
            with threads(count):
                many = in_passes(model, texts, [[60, 37], [1, 1], [39, 62]], page_size)
                one = in_passes(model, texts[:1], [[60], [1], [39]], page_size)
            assert torch.equal(many, alone) and torch.equal(one, alone[:1])
