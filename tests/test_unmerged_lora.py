"""One adapter beside the weights, for all rows of a pass."""

import inspect

import pytest
import torch
from conftest import random_tokens, refused, run_rows
from lora_files import LINEAR, random_pairs, with_adapters

from infer import generate
from loading.load import load_model, save_model
from native import use_native
from sampling import SamplingParams


def test_layers_of_whole_numbers_keep_them(tiny_llama):
    """The base is rounded, what an adapter adds is not."""
    from natives import to_int8

    from adapters import use_adapters

    model = tiny_llama(dtype=torch.float32)
    base = to_int8(tiny_llama(dtype=torch.float32)).layers[1].mlp.down_proj
    model = with_adapters(to_int8(model))
    layer = model.layers[1].mlp.down_proj
    a, b = random_pairs(model, LINEAR, seed=1)["layers.1.mlp.down_proj.weight"]
    x = torch.randn(5, 24)
    with use_adapters(model, ["b", "b"]):
        found = layer(x)
    assert (found - base(x) - x @ a.float().T @ b.float().T).abs().max() < 1e-4
    with use_adapters(model, [""]):
        assert torch.equal(layer(x), base(x))
    assert torch.equal(layer(x), base(x))  # it is over


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_failed_pass_leaves_no_adapter(tiny, use_cache):
    model = with_adapters(tiny())
    prompts = [random_tokens(5)]
    options = {"max_new_tokens": 4, "ignore_eos": True, "options": {"use_cache": use_cache}}
    before = run_rows(model, prompts, **options)

    def fail(module, args):
        raise ZeroDivisionError

    hook = model.h[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        next(generate(model, prompts, SamplingParams(4), use_cache=use_cache, adapter="a"))
    hook.remove()
    assert torch.equal(model(torch.tensor(prompts)), tiny()(torch.tensor(prompts)))
    assert run_rows(model, prompts, **options) == before


def test_passes_of_c_are_left_to_torch(tiny_llama, compiled, tmp_path):
    """C's pass calls no hooks. Attached before or after layers are replaced, an adapter stays."""
    save_model(tiny_llama(dtype=torch.float32), tmp_path)
    plain = with_adapters(load_model(tmp_path))
    early, late = with_adapters(load_model(tmp_path)), load_model(tmp_path)
    use_native(early)
    use_native(late)
    with_adapters(late)
    prompts = [random_tokens(length, seed=length) for length in (3, 9)]
    for name in ("", "a", "b"):
        given = {"options": {"adapter": name}, "max_new_tokens": 6, "ignore_eos": True}
        expected = run_rows(plain, prompts, **given)
        assert run_rows(late, prompts, **given) == expected
        assert run_rows(early, prompts, **given) == expected


def test_unknown_names_are_refused(tiny):
    assert "adapter" in inspect.signature(generate).parameters
    params = SamplingParams(1, seed=1)
    message = refused(list, generate(tiny(), [[1]], params, adapter="a"))
    assert "adapter 'a'" in message and "no adapters" in message
    message = refused(list, generate(with_adapters(tiny()), [[1]], params, adapter="c"))
    assert message == "adapter 'c': must be one of: a, b"


def merged_model(build, lora_weights, **options):
    """A random model with an adapter in its weights."""
    model = build(**options)
    for name, (a, b) in lora_weights.items():
        model.get_parameter(name).data += b.to(model.dtype) @ a.to(model.dtype)
    return model


@pytest.mark.parametrize("kind", ["tiny", "tiny_llama", "tiny_gemma", "tiny_windows"])
def test_a_run_is_that_of_the_merged_model(request, kind):
    build = request.getfixturevalue(kind)
    model = with_adapters(build())
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19)]
    params = {"max_new_tokens": 25, "ignore_eos": True}
    texts = []
    for seed, name in enumerate("ab"):
        merged = merged_model(build, random_pairs(model, LINEAR, seed))
        for use_cache in (True, False):
            options = {"adapter": name, "use_cache": use_cache}
            texts.append(run_rows(model, prompts, options=options, **params))
            assert texts[-1] == run_rows(merged, prompts, **params)
    base = run_rows(build(), prompts, **params)
    assert run_rows(model, prompts, **params) == base
    assert base not in texts and texts[0] == texts[1] != texts[2]


def test_heads_and_experts_are_only_merged(tiny_llama, tiny_experts):
    message = refused(with_adapters, tiny_llama(), ("q_proj", "lm_head"))
    assert message == "adapter 'a' changes lm_head: merge it with --adapter"
    message = refused(with_adapters, tiny_experts(), ("up_proj",))
    assert message.startswith("adapter 'a' changes layers.0.mlp.experts.0.up_proj: merge")
