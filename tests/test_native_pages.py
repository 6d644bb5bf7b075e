"""The engine's passes in C, which read keys and values in their pages."""

import math
import random

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from engines import check_texts, finish, greedy, make_engine
from natives import in_passes, in_pieces, native, to_int8

from loading.load import load_model

pytestmark = pytest.mark.usefixtures("compiled")
DRAFT = CHECKPOINTS / "stories-draft"
ARGS = ("--prompt", "Once upon a time", "--prompt", "Lily", "--max-new-tokens", 20)


@pytest.mark.parametrize("options", [(), ("--backend", "native", "--draft", DRAFT)], ids=str)
def test_the_passes_of_the_engine_are_native(engine_cli, torch_passes, options):
    code, out, err = engine_cli(*ARGS, *options)
    assert code == 0 and "note" not in err
    assert torch_passes == []
    assert out == engine_cli(*ARGS, *options, "--backend", "torch")[1]
    assert torch_passes


@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_pages_anywhere_give_the_bits_of_a_row(build, dtype, page_size):
    model = build(dtype=torch.float32)
    model = native(to_int8(model) if dtype == torch.int8 else model)
    texts = [random_tokens(16, seed=row) for row in range(3)]
    logits = in_passes(model, texts, [[5] * 3] * 3 + [[1] * 3], page_size)
    assert torch.equal(logits, in_pieces(model, torch.tensor(texts), 16))


def requests(count: int, seed: int) -> tuple[list, list]:
    """Prompts and parameters of every kind."""
    choose = random.Random(seed).choice
    prompts = []
    params = []
    for number in range(count):
        prompts.append(random_tokens(choose([3, 60, 61, 100]), 4095, seed=choose([1, 2, 3])))
        fields = {"temperature": choose([0.0, 0.8, 1.2]), "top_p": choose([1.0, 0.9])}
        fields |= {"top_k": choose([0, 50]), "presence_penalty": choose([0.0, 0.5])}
        fields |= {"repetition_penalty": choose([1.0, 1.2]), "seed": number}
        params.append(greedy(choose([20, 60]), **fields))
    return prompts, params


@pytest.mark.parametrize(
    "name, dtype", [("stories-llama", torch.float32), ("stories-draft", torch.int8)]
)
@pytest.mark.parametrize("drafts", ["none", "lookup", "model"])
def test_texts_of_a_checkpoint_bit_for_bit(name, dtype, drafts):
    """They are equal in float32 too, with preemption, shared prefixes, chunks and drafts."""
    from engine.drafter import PagedModelDrafter, PromptLookupDrafter

    model = native(load_model(CHECKPOINTS / name, dtype))
    options = {"max_num_seqs": 4, "num_pages": 32, "page_size": 8, "max_num_batched_tokens": 40}
    if drafts == "lookup":
        options["drafter"] = PromptLookupDrafter()
    elif drafts == "model":
        draft = native(load_model(DRAFT, dtype))
        options["drafter"] = PagedModelDrafter(draft, model, 4)
    engine, made = make_engine(model, *requests(8, seed=len(drafts)), **options)
    finish(engine)
    check_texts(model, made)
    assert engine.scheduler.num_preemptions and {it.finish_reason for it in made} == {"length"}
    assert drafts == "none" or engine.num_draft_tokens


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_text_reaches_no_other(tiny, bad):
    """Its text ends with an error, and its pages go to others."""
    model = tiny(dtype=torch.float32)
    model.wpe.weight.data[5] = bad
    native(model)
    prompts = [random_tokens(8 if row == 1 else 2, seed=row) for row in range(6)]
    pool = {"max_num_seqs": 2, "num_pages": 8, "page_size": 2}
    engine, made = make_engine(model, prompts, greedy(3), **pool)
    finish(engine)
    assert [request.finish_reason for request in made] == ["length", "error", *["length"] * 4]
    check_texts(model, [made[row] for row in (0, 2, 3, 4, 5)])
