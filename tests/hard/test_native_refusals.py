"""What C must not read or write is refused before anything changes, and nothing else is lost."""

import concurrent.futures
import math

import pytest
import torch
from conftest import random_tokens, run_rows
from natives import both, native, passed, to_int8

from cache import KVCache
from errors import UserError
from infer import pass_logits
from llama import rotary_embedding
from model import TorchRunner
from native import use_native

pytestmark = pytest.mark.usefixtures("compiled")
REFUSED = "native code reads contiguous torch"


def pairs(table: dict[str, list]) -> list[tuple]:
    return [(key, value) for key, values in table.items() for value in values]


BROKEN = {
    "tiny": ["wte.weight", "h.0.mlp.c_fc.weight", "h.1.attn.c_attn.bias", "ln_f.bias"],
    "tiny_llama": [
        "embed_tokens.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.input_layernorm.weight",
        "norm.weight",
    ],
}


@pytest.mark.parametrize("family, where", pairs(BROKEN))
def test_logits_that_are_not_finite_are_noticed(request, family, where):
    model = request.getfixturevalue(family)(dtype=torch.float32)
    with torch.no_grad():
        dict(model.named_parameters())[where].view(-1)[7] = math.nan
    with pytest.raises(UserError, match="logits that are NaN or infinite"):
        run_rows(native(model), [[0, 1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
@pytest.mark.parametrize("where", ["wte", "wpe", "h.1.attn.c_proj", "h.1.mlp.c_fc", "ln_f"])
@pytest.mark.parametrize("change", ["longer", "shorter", "wider", "other dtype", "other strides"])
def test_weights_of_another_form_are_refused(tiny, kind, where, change):
    model = tiny(dtype=torch.float32)
    model = to_int8(model) if kind == torch.int8 else model
    module = model.get_submodule(where)
    weight = module.weight.detach()
    wider = torch.cat([weight, weight], dim=-1)
    changed = {
        "longer": torch.cat([weight, weight]),
        "shorter": weight[:-1].clone(),
        "wider": wider,
        "other dtype": weight.to(torch.float64),
        "other strides": wider[..., ::2],
    }[change]
    if isinstance(module.weight, torch.nn.Parameter):
        module.weight.data = changed
    else:
        module.weight = changed
    with pytest.raises(ValueError, match=REFUSED):
        native(model)


WIDTHS = {
    "tiny": ["lm_head", "h.1.mlp.c_fc", "h.1.attn.c_attn", "h.1.mlp.c_proj"],
    "tiny_llama": [
        *(f"layers.1.self_attn.{part}_proj" for part in "qkvo"),
        *(f"layers.1.mlp.{part}_proj" for part in ("up", "down")),
    ],
    "tiny_experts": [
        "layers.1.mlp.experts.4.up_proj",
        "layers.1.mlp.experts.4.down_proj",
        "layers.1.mlp.gate",
    ],
}


@pytest.mark.parametrize("family, where", pairs(WIDTHS))
def test_a_layer_of_another_width_is_refused(request, family, where):
    model = request.getfixturevalue(family)(dtype=torch.float32)
    parent, _, name = where.rpartition(".")
    old = model.get_submodule(where)
    new = torch.nn.Linear(old.in_features, old.out_features + 6, bias=old.bias is not None)
    setattr(model.get_submodule(parent), name, new)
    with pytest.raises(ValueError, match=REFUSED):
        native(model)


@pytest.mark.parametrize(
    "width, dtype", [(10, torch.int8), (5, torch.float16), (6, torch.bfloat16)]
)
def test_storages_of_another_width_or_dtype_are_refused(tiny_llama, width, dtype):
    storage = torch.zeros(2, 2, 1, 2, 16, width, dtype=dtype)
    with pytest.raises(ValueError, match=REFUSED):
        passed(native(tiny_llama(dtype=torch.float32)), storage, [([0], 0, [1])], [1])


def test_other_weights_are_refused(tiny, tiny_llama):
    with pytest.raises(ValueError, match=REFUSED):
        native(tiny())
    model = tiny_llama(dtype=torch.float32, qk_norm=True)
    model.layers[1].self_attn.k_norm.weight = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match=r"reads contiguous torch.float32 \(6,\) .* \(16,\)"):
        native(model)


@pytest.mark.parametrize("heads", [3, 8])
def test_heads_that_cannot_share_keys_are_refused(tiny_llama, heads):
    with pytest.raises(ValueError, match="4 heads cannot share the keys of"):
        native(tiny_llama(dtype=torch.float32, n_kv_head=heads))


def test_another_architecture_is_refused(build):
    model = build(dtype=torch.float32)
    model.__class__ = type("Mamba", (type(model),), {})
    words = "native code computes GPT and Llama and Gemma; this is Mamba"
    with pytest.raises(ValueError, match=words):
        use_native(model)
    assert type(model.runner) is TorchRunner


def test_layers_become_native_once(tiny):
    model = native(tiny(dtype=torch.float32))
    with pytest.raises(ValueError, match="the layers of this model are native already"):
        native(model)


@pytest.mark.parametrize(
    "parts, keep, message",
    [
        ([([0], 0, [61])], [1], r"tokens \[61\]: must be from 0 to 60"),
        ([([0], 0, [-1])], [1], r"tokens \[-1\]: must be from 0 to 60"),
        ([([2], 0, [1])], [1], r"pages \[2\]: must be from 0 to 1"),
        ([([-1], 0, [1])], [1], "pages .-1.: must be from 0 to 1"),
        ([([0], 5, [1] * 4)], [1], "^4 tokens from start 5: must fit in 8 positions"),
        ([([0], -1, [1])], [1], "^1 tokens from start -1: must fit in 8 positions"),
        ([([0], 0, [1])], [2], r"^keep 2: must be from 0 to the number of tokens \(1\)"),
        ([([0], 0, [1])], [-1], "^keep -1: must be from 0 to"),
        ([([0, 1, 1], 16, [1])], [1], r"positions \[16\]: must be from 0 to 15"),
        ([([0], 0, [1])], [1, 1], "zip"),
    ],
)
def test_nothing_outside_its_arrays_is_touched(tiny, parts, keep, message):
    model = native(tiny(dtype=torch.float32))
    storage = torch.zeros(2, 2, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=message):
        passed(model, storage, parts, keep)
    assert not storage.any()


def test_a_span_may_want_no_logits(tiny):
    model = native(tiny(dtype=torch.float32))
    storage, alone = torch.zeros(2, 2, 2, 2, 2, 8, 8)
    logits = passed(model, storage, [([0], 0, [1, 2]), ([1], 0, [3])], [0, 1])
    assert torch.equal(logits, passed(model, alone, [([1], 0, [3])], [1]))
    passed(model, alone, [([0], 0, [1, 2])], [2])
    assert storage[:, :, 0].any() and torch.equal(storage, alone)


@pytest.mark.parametrize(
    "new, row, message",
    [
        ([1] * 9, 0, "9 positions exceed max_len"),
        ([], 0, "with at least one token"),
        ([1], 2, r"pages \[2\]: must be from 0 to 0"),  # only the list of tokens has it
    ],
)
def test_a_cache_that_is_full_is_not_touched(tiny, new, row, message):
    model = native(tiny(dtype=torch.float32))
    cache = KVCache(model, 1, 8)
    cache.tokens = [[] for _ in range(row + 1)]
    with pytest.raises(ValueError, match=message):
        pass_logits(model, [new], [row], cache, 1)
    assert not any(cache.tokens[:1]) and not cache.storage.any()


OTHERS = {
    "tiny": [{"n_layer": 1}, {"n_head": 4}, {"n_embd": 32}],
    "tiny_llama": [{"n_layer": 1}, {"n_kv_head": 4}, {"n_kv_head": 1}, {"head_dim": 4}],
}


@pytest.mark.parametrize("family, shape", pairs(OTHERS))
def test_the_cache_of_another_model_is_refused(request, family, shape):
    build = request.getfixturevalue(family)
    model = native(build(dtype=torch.float32))
    other = KVCache(build(dtype=torch.float32, **shape), 1)
    with pytest.raises(ValueError, match=REFUSED):
        passed(model, other.storage, [([0], 0, [1])], [1])


def test_two_threads_may_use_one_model(tiny):
    model = native(tiny(dtype=torch.float32, n_embd=64, n_layer=4))

    def text(seed):
        return run_rows(model, [random_tokens(6, seed=seed)], max_new_tokens=60, ignore_eos=True)

    expected = [text(seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4))) == expected


def test_the_table_of_rotations_outlives_its_cache(tiny_llama):
    eager, model = both(tiny_llama)
    prompt = [random_tokens(4)]
    expected = run_rows(eager, prompt, max_new_tokens=12, ignore_eos=True)
    rotary_embedding.cache_clear()
    others = [torch.full((64, 1, 6), torch.nan) for _ in range(1000)]  # in its memory, if free
    assert run_rows(model, prompt, max_new_tokens=12, ignore_eos=True) == expected and others


def test_the_table_of_rotations_grows_with_use(tiny_llama):
    """A table for a million positions would be 48 MB here; passes of another thread keep theirs."""
    eager, model = both(tiny_llama, block_size=10**6)
    prompt = [random_tokens(4)]
    expected = run_rows(eager, prompt, max_new_tokens=80, ignore_eos=True)
    assert run_rows(model, prompt, max_new_tokens=80, ignore_eos=True) == expected
    assert len(model.runner.rotary_embedding[0].cos) < 1000
