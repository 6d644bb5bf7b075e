"""Each family against transformers: logits, command line, files; and modes, dtypes and ranks."""

import copy
import dataclasses
import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHECKPOINTS,
    check_command_line,
    check_modes,
    difference,
    edit_json,
    exact_gemma_norm,
    load,
    random_tokens,
    refused,
    run,
    run_rows,
    save_speaking,
)
from engines import finish, make_engine, own_texts, request_params
from families import EACH_FAMILY, EAGER, PEERS, SAVED, family, random_shape
from natives import in_pieces, native_in_dtype, quantised, random_texts, to_int8
from ranks import ROUNDING, compared, run_engine_script, save_uneven
from safetensors.torch import load_file, save_file

import errors
from cache import KVCache, Span
from engine.cache import PagedCache
from llama import LlamaConfig, RMSNorm, RopeScaling, RotaryEmbedding, rotary_embedding
from loading.load import save_model
from parallel.shards import ShardPlan

# Logits


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", PEERS)
def test_logits_equal_transformers(peer, kind, seed):
    theirs, directory = peer(kind, **random_shape(kind, random.Random(seed).choice))
    assert difference(load(directory), theirs) < 1e-10


@pytest.mark.parametrize("name", ["stories-draft", "stories-llama", "stories-experts"])
def test_logits_of_a_checkpoint_equal_transformers(name):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32).eval()
    assert difference(load(CHECKPOINTS / name, torch.float32), theirs) < 1e-4


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 16}


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"factor": 1.5, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        {"low_freq_factor": 0.1, "high_freq_factor": 0.2},
        {"rope_theta": 500000.0, "original_max_position_embeddings": 64, "low_freq_factor": 1},
    ],
)
@torch.inference_mode()
def test_logits_beyond_the_original_window_equal_transformers(peer, scaling, older):
    rope = {"rope_type": "llama3", "rope_theta": 1000.0} | SCALING | scaling
    shape = {"hidden_size": 32, "head_dim": 16, "max_position_embeddings": 128}
    theirs, directory = peer("Llama", rope_parameters=rope, **shape)
    if older:  # the form of the files of Llama 3.1
        theta = rope.pop("rope_theta")
        changes = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": rope}
        edit_json(directory / "config.json", changes)
    ours = load(directory)
    assert difference(ours, theirs) < 1e-10
    unscaled = type(ours)(dataclasses.replace(ours.config, rope_scaling=None)).double()
    unscaled.load_state_dict(ours.state_dict())
    tokens = torch.tensor([random_tokens(128)])
    assert (unscaled(tokens) - ours(tokens)).abs().amax(-1)[0, 64:].mean() > 0.05


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ON_THE_COMMAND_LINE = {
    "Qwen3": {"head_dim": 6},
    "Qwen3Moe": EAGER | EXPERTS | {"head_dim": 6},
    "Mistral": {"sliding_window": 5},
    "Gemma3": {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 6},
}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kind", ON_THE_COMMAND_LINE)
def test_the_command_line_writes_what_transformers_does(cli, tmp_path, kind, backend):
    options = ("--backend", backend)
    check_command_line(cli, tmp_path, kind, 30, *options, **ON_THE_COMMAND_LINE[kind])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
@EACH_FAMILY
def test_batches_shifts_speculation_and_beams_equal_a_full_pass(request, kind, dtype):
    build = family(request, kind)
    model = build() if dtype == torch.float64 else to_int8(build())
    prompts = [[1, 2, 3], [4], random_tokens(30), random_tokens(70)]
    check_modes(model, build(seed=1), prompts, 60 if model.config.block_size == 40 else 30)


def test_an_empty_prompt_starts_from_bos(tiny_llama):
    (row, expected) = run_rows(tiny_llama(), [[], [59]], max_new_tokens=9, ignore_eos=True)
    assert row == expected


@pytest.mark.parametrize(
    "weights, cache_dtype, page_size",
    [
        ("torch", None, 1),
        ("torch", torch.float16, 4),
        ("torch", torch.int8, 4),
        (torch.float32, None, 4),
        (torch.float32, torch.int8, 8),
        (torch.bfloat16, None, 4),
        (torch.int8, None, 4),
        (torch.int8, torch.float16, 1),
        (torch.uint8, None, 4),
    ],
    ids=str,
)
@EACH_FAMILY
def test_the_engine_equals_generate(
    request, compiled, monkeypatch, kind, weights, cache_dtype, page_size
):
    """With chunks, preemption, context shifts, and pages that hold NaN."""
    if weights == "torch":
        model = family(request, kind)()
    else:
        model = native_in_dtype(family(request, kind)(dtype=torch.float32), weights)
        monkeypatch.setattr(type(model), "hidden", None)  # the whole pass is in C
    prompts = [random_tokens(length, seed=length) for length in (3, 14, 1, 38, 60, 9)]
    params = request_params(len(prompts), max_new_tokens=30, temperature=0.8)
    options = {"page_size": page_size, "cache_dtype": cache_dtype}
    num_pages = 2 * model.config.block_size // page_size
    options |= {"num_pages": num_pages, "max_num_seqs": 4, "max_num_batched_tokens": 7}
    engine, requests = make_engine(model, prompts, params, **options)
    for storage in engine.cache.storages:
        storage.view(torch.uint8).fill_(255)
        assert cache_dtype in (None, storage.dtype)
    finish(engine)
    own = own_texts(model, prompts, params, cache_dtype=cache_dtype)
    assert [request.output for request in requests] == own
    assert engine.scheduler.num_preemptions or kind == "Mistral"  # whose windows free pages


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@EACH_FAMILY
def test_half_precision_stays_close(request, kind, dtype):
    model = family(request, kind)()
    texts = random_texts(model, 8)
    exact = model(texts).log_softmax(-1)
    half = copy.deepcopy(model).to(dtype)(texts).double().log_softmax(-1)
    divergences = (exact.exp() * (exact - half)).sum(-1)  # few tokens take other experts
    assert divergences.median() < {torch.float16: 1e-4, torch.bfloat16: 0.005}[dtype]


@torch.inference_mode()
def test_a_gemma_in_bfloat16_rounds_where_transformers_does(tiny_gemma):
    """Norms round once, after the product with their weights, and the root of the width does."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    model = tiny_gemma(dtype=torch.bfloat16, n_embd=48)
    assert model.embedding_scale == 6.9375  # not 6.928
    tokens = torch.arange(61)
    assert torch.equal(model.embed(tokens), model.embed_tokens.weight * model.embedding_scale)
    theirs = Gemma3RMSNorm(48, 1e-6).bfloat16()
    theirs.weight.data = model.norm.weight.data
    x = 10 * torch.randn(500, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    different = (model.norm(x) != theirs(x)).float().mean()
    assert different < 1e-3  # torch's rms_norm may round the mean's last bit otherwise


@torch.inference_mode()
@pytest.mark.parametrize(
    "dtype, tied", [(torch.int8, True), (torch.int8, False), (torch.uint8, True)]
)
@EACH_FAMILY
def test_all_matrices_are_rounded_and_nothing_else(request, tmp_path, kind, dtype, tied):
    shape = SAVED.get(kind, {}) | ({} if kind == "GPT2" else {"tie_word_embeddings": tied})
    whole = family(request, kind)(dtype=torch.float32, **shape)
    save_model(whole, tmp_path)
    texts = random_texts(whole, 4)
    exact = whole(texts)
    read = load(tmp_path, dtype)
    rounded = quantised(whole, dtype).state_dict()
    tensors = read.state_dict()
    assert tensors.keys() == rounded.keys() and read.dtype == torch.float32
    for name, tensor in rounded.items():
        assert torch.equal(tensor, tensors[name]), name
        is_matrix = name.endswith("weight") and tensor.dim() == 2 and name != "wpe.weight"
        assert (tensor.dtype == torch.int8) == is_matrix, name
    head, embedding = read.layer("head"), read.layer("embedding")
    shared = read.config.tie_word_embeddings
    assert (head.weight is embedding.weight) == (head.scale is embedding.scale) == shared
    assert 0 < (read(texts) - exact).abs().median() < 0.05 * exact.std()


# The mixture of experts, windows, and rotations


@torch.inference_mode()
def test_weights_are_shares_of_a_softmax_over_all_experts(tiny_experts):
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, experts = tiny_experts(sizes={"norm_topk_prob": False}).layers[1].mlp.route(x)
    layer = tiny_experts().layers[1].mlp
    shares = layer.gate(x).float().softmax(-1)
    for row, own, chosen in zip(shares.tolist(), weights.tolist(), experts.tolist()):
        best = sorted(range(5), key=lambda expert: -row[expert])[:2]
        assert (chosen, own) == (best, [row[expert] for expert in best])
    normalized, same = layer.route(x)
    assert torch.equal(same, experts) and normalized.dtype == torch.float64
    assert torch.allclose(normalized, weights / weights.sum(-1, keepdim=True), atol=1e-7)


@torch.inference_mode()
@pytest.mark.parametrize("count", [5, 200])  # from some size on, sorts of torch are others
def test_of_experts_that_tie_the_lower_numbers_win(tiny_experts, count):
    """torch.topk leaves open which: for zeros it gives 6, 5 and 4 of 8."""
    layer = tiny_experts(sizes={"num_experts": count, "num_experts_per_tok": 3}).layers[1].mlp
    layer.gate.weight.zero_()
    weights, experts = layer.route(torch.randn(4, 16).double())
    assert experts.tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(weights, torch.full((4, 3), 1 / 3).double())
    layer.gate.weight[3] = 1
    assert layer.route(torch.ones(1, 16).double())[1].tolist() == [[3, 0, 1]]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8], ids=str)
def test_each_layer_reaches_its_window_further(tiny_windows, compiled, dtype):
    """Two layers of windows 3 and 4 see 1 + 2 + 3 positions; what was before changes no bit."""
    in_c = dtype != torch.float64
    model = tiny_windows(sliding_windows=(3, 4), dtype=torch.float32 if in_c else dtype)
    model = native_in_dtype(model, dtype) if in_c else model
    text = torch.tensor([random_tokens(30)])
    for size in (1, 30):
        last = in_pieces(model, text, size)[0, -1]
        changes = []
        for position in range(30):
            other = text.clone()
            other[0, position] = (other[0, position] + 1) % 61
            changes.append(not torch.equal(in_pieces(model, other, size)[0, -1], last))
        assert changes == [False] * 24 + [True] * 6


@torch.inference_mode()
def test_a_step_reads_no_more_than_the_window(tiny_windows, attended):
    """A row alone reads its keys, several read from the first that one sees, the engine pages."""
    model = tiny_windows()
    cache = KVCache(model, 2)
    read = []
    for rows, new in (([0, 1], 30), ([0, 1], 1), ([1], 4), ([0, 1], 1)):
        attended.clear()
        spans = cache.spans([random_tokens(new)] * len(rows), rows)
        model.runner.logits(model, cache, spans, [1] * len(rows))
        cache.commit()
        read.append([k.shape[2] for _, k, _ in attended])
    # The last step computes positions 31 and 35.
    assert read == [[30, 30, 30], [3, 31, 8], [6, 35, 11], [7, 36, 12]]
    paged = PagedCache(model, 10, page_size=4)
    attended.clear()
    spans = [Span([*range(10)], 37, [1]), Span([*range(10)], 30, [1])]
    model.runner.logits(model, paged, spans, [1, 1])
    assert sorted(k.shape[2] for _, k, _ in attended) == [8, 12, 40]  # whole pages


@pytest.mark.parametrize("head_dim", [2, 6, 128, 1000])
def test_rotations_are_the_same_however_far_earlier_sequences_came(head_dim):
    """Tables grow by whole pieces and at least double; each kind is kept for the next pass."""
    cpu = torch.device("cpu")
    config = LlamaConfig(head_dim=head_dim)
    whole = RotaryEmbedding(config, torch.float32, cpu).cos_sin(700)
    grown = RotaryEmbedding(config, torch.float32, cpu)
    for length, size in ((1, 64), (64, 64), (65, 128), (130, 256), (7, 256), (700, 704)):
        for table, expected in zip(grown.cos_sin(length), whole):
            assert table.shape == (length, 1, head_dim)
            assert torch.equal(table, expected[:length])
        assert len(grown.cos) == len(grown.sin) == size
    kept = rotary_embedding(config, torch.float32, cpu)
    assert rotary_embedding(LlamaConfig(head_dim=head_dim), torch.float32, cpu) is kept
    other = LlamaConfig(head_dim=head_dim, rope_theta=77.0)
    assert rotary_embedding(other, torch.float32, cpu) is not kept


def test_a_large_window_costs_nothing_until_it_is_used(tiny_llama):
    """A table for all of it would be 4 GB here: a config.json of one line would fill the memory."""
    model = tiny_llama(block_size=10**6, head_dim=500, dtype=torch.float32)
    run(model, [[1, 2]], max_new_tokens=3, options={"use_cache": False})
    table = rotary_embedding(model.config, torch.float32, torch.device("cpu"))
    assert len(table.cos) == len(table.sin) < 100


def test_a_model_that_has_generated_can_be_trained(tiny_llama):
    """What it keeps was made in inference mode, and gradients go through none of that."""
    model = tiny_llama(rope_theta=123.0)  # its table of rotations is made while it generates
    run(model, [[1, 2]], max_new_tokens=3)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    for layer in model.layers:
        assert layer.self_attn.k_proj.weight.grad.abs().max() > 0


def test_a_norm_in_half_precision_does_not_overflow():
    norm = RMSNorm(LlamaConfig(n_embd=4)).half()
    torch.nn.init.ones_(norm.weight)
    x = torch.tensor([300.0, -300.0, 300.0, -300.0], dtype=torch.float16)
    assert norm(x).tolist() == [1, -1, 1, -1] and norm(x).dtype == torch.float16


# On several processes

HEADS = {
    "GPT2": (3, [2, 2, 1]),
    "Gemma2": (2, [3, 2]),
    "Gemma3": (2, [3, 2]),
    "Mistral": (2, [3, 2]),
}
UNEVEN = {
    "Qwen3Moe": {"sizes": {"n_inner": 160, "mlp_only_layers": (0,)}},
    "Gemma3": {"sliding_windows": (5, None)},
}


def save_uneven_family(request, kind: str, directory):
    fixture = "tiny" if kind == "GPT2" else "tiny_llama"
    return save_uneven(family(request, kind), directory, fixture, **UNEVEN.get(kind, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@EACH_FAMILY
def test_ranks_have_the_logits_of_one_process(request, compiled, tmp_path, kind, dtype):
    name = save_uneven_family(request, kind, tmp_path)
    size, expected = HEADS.get(kind, (4, [2, 1, 1, 1]))
    found, _, heads = compared(size, name, torch.tensor([random_tokens(23)]), dtype=dtype)
    assert found <= ROUNDING[dtype] and heads == expected


@pytest.mark.parametrize("parallel_mode", ["gather", "reduce"])
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen3Moe", "Gemma3"])
def test_ranks_in_float64(request, tmp_path, kind, parallel_mode):
    name = save_uneven_family(request, kind, tmp_path)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    assert compared(3, name, tokens, parallel_mode, **options)[0] < 1e-11


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Gemma3"])
def test_two_ranks_write_the_outputs_of_one(request, engine_cli, tmp_path, kind):
    name = save_speaking(family(request, kind), tmp_path, eos_token_id=4095, **SAVED.get(kind, {}))
    arguments = ["--model", name, "--prompt", "Lily", "--num-samples", 3, "--seed", 1]
    arguments += ["--temperature", 0.8, "--max-new-tokens", 20]
    out = engine_cli(*arguments)[1]
    assert out and run_engine_script(2, tmp_path, *arguments)[0] == out


def test_a_rank_has_a_share_of_each_expert_and_all_of_the_router(tiny_experts):
    for mode, rows, columns in (
        ("gather", range(8, 16), slice(None)),
        ("reduce", range(16), slice(6, 12)),
    ):
        group = SimpleNamespace(size=2, rank=1, parallel_mode=mode)
        parts = ShardPlan(tiny_experts(), group).shards
        assert parts["layers.1.mlp.gate.weight"].rows == [range(5)]
        for name in ("gate_proj", "up_proj"):
            assert parts[f"layers.1.mlp.experts.4.{name}.weight"].rows == [range(6, 12)]
        down = parts["layers.1.mlp.experts.4.down_proj.weight"]
        assert (down.rows, down.columns) == ([rows], columns)


# Files


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("Llama", {"eos_token_ids": (60, 3), "norm_eps": 1e-3, "tie_word_embeddings": True}),
        ("Llama", {"rope_scaling": RopeScaling(**SCALING)}),
        ("Qwen2", {}),
        ("Qwen2", {"sliding_windows": (5, None)}),
        ("Qwen3", {"n_embd": 18, "tie_word_embeddings": True}),  # which heads do not divide
        ("Qwen3", {"sliding_windows": (), "n_layer": 2}),
        ("Qwen3Moe", {"sliding_windows": (7, 7)}),
        ("Qwen3Moe", {"sizes": {"mlp_only_layers": (1,), "norm_topk_prob": False}}),
        ("Mistral", {"n_embd": 18}),
        ("Gemma3", {"sliding_windows": (5, 5, None)}),
        ("Gemma3", {"tie_word_embeddings": False, "sliding_windows": (None, None)}),
        ("Gemma3", {"rope_linear_factor": 1.0, "sliding_windows": (5, 5)}),
    ],
    ids=str,
)
def test_save_and_load_give_the_same_model(request, tmp_path, kind, shape):
    from transformers import AutoModelForCausalLM

    ours = family(request, kind)(dtype=torch.float32, **{"rope_theta": 500.0} | shape)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert difference(ours, theirs) < (2e-4 if kind == "Gemma3" else 1e-4)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [type(theirs).__name__] == [f"{kind}ForCausalLM"]
    assert saved["model_type"] == theirs.config.model_type
    again = load(tmp_path, torch.float32)
    windows = ours.config.sliding_windows
    windows = windows if any(windows) else ()
    assert again.config == dataclasses.replace(ours.config, sliding_windows=windows)
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "kind, shape, words",
    [
        ("Llama", {"n_embd": 18}, "n_embd is 18; transformers needs a multiple of n_head"),
        ("Mistral", {"sliding_windows": (5, None)}, "(5, None); transformers supports no such Mis"),
        ("Mistral", {"sliding_windows": (5, 6)}, "(5, 6); transformers supports no such Mistral"),
        ("Qwen3", {"sliding_windows": (5, 6)}, "(5, 6); transformers supports no such Qwen3"),
    ],
)
def test_what_transformers_would_refuse_is_not_written(request, tmp_path, kind, shape, words):
    model = family(request, kind)(**shape)
    run(model, [[1]], max_new_tokens=2)  # though it computes
    assert words in refused(save_model, model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_those_of_the_config_are_refused(tiny_llama, tiny_experts, tmp_path):
    save_model(tiny_llama(), tmp_path)
    edit_json(tmp_path / "config.json", {"model_type": "qwen3"})
    assert re.search("self_attn.[kq]_norm.weight is missing", refused(load, tmp_path))
    save_model(tiny_experts(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expert = "layers.1.mlp.experts.{}.up_proj.weight"
    save_file(tensors | {expert.format(5): tensors[expert.format(4)].clone()}, file)
    assert f"unexpected tensor {expert.format(5)}" in refused(load, tmp_path)
    del tensors[expert.format(3)]
    save_file(tensors, file)
    assert f"tensor {expert.format(3)} is missing" in refused(load, tmp_path)


@pytest.fixture
def notes(capsys):
    errors.warn_once.cache_clear()
    return lambda: capsys.readouterr().err


def add_head(directory, head) -> None:
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)  # of older files
    save_file(stored | {"lm_head.weight": head}, directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_another_head_in_the_file_counts_as_in_transformers(peer, notes, kind):
    import transformers

    _, directory = peer(kind, tie_word_embeddings=True, head_dim=6)
    add_head(directory, torch.randn(61, 16, dtype=torch.float64))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    notes()
    ours = load(directory)
    assert not ours.config.tie_word_embeddings and difference(ours, theirs) < 1e-9
    words = "lm_head.weight differs from the embedding, though tie_word_embeddings is true"
    assert notes() == f"note: {directory}: {words}: used untied, as in transformers\n"


def test_the_same_head_is_tied_and_a_gpt_2_has_no_other(tiny, tiny_llama, tmp_path, notes):
    model = tiny_llama(tie_word_embeddings=True)
    save_model(model, tmp_path)
    add_head(tmp_path, model.embed_tokens.weight.detach().clone())
    assert load(tmp_path).config.tie_word_embeddings and notes() == ""
    save_model(tiny(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(61, 16, dtype=torch.float64)}, file)
    words = "lm_head.weight differs from the embedding; a GPT has one matrix"
    assert words in refused(load, tmp_path)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A random model of pictures and texts of transformers, in float64, and where it is saved."""
    import transformers
    from transformers.models.gemma3 import modeling_gemma3

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", exact_gemma_norm)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    text |= {"max_position_embeddings": 24, "sliding_window": 5}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 14}
    vision |= {"num_attention_heads": 2, "patch_size": 14}
    parts = {"text_config": text, "vision_config": vision}
    config = transformers.Gemma3Config(**parts, mm_tokens_per_image=1, eos_token_id=[1, 7])
    model = transformers.Gemma3ForConditionalGeneration(config).double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(std=0.4, generator=generator)
    model.save_pretrained(tmp_path)
    return model.eval(), tmp_path


@pytest.mark.parametrize("published", [False, True])  # else as transformers 5 writes it
@pytest.mark.parametrize("has_head", [False, True])
@torch.inference_mode()
def test_the_texts_of_a_model_of_pictures(pictures, published, has_head, notes):
    """As Gemma 3 4b and larger are published: a nested config, and names with a prefix."""
    theirs, directory = pictures
    stored = load_file(directory / "model.safetensors")
    if published:
        renamed = [("model.language_model.", "language_model.model."), ("model.vision", "vision")]
        renamed.append(("model.multi_modal", "multi_modal"))
        for old, new in renamed:
            names = [name for name in stored if name.startswith(old)]
            stored |= {name.replace(old, new, 1): stored.pop(name) for name in names}
    if has_head:
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(61, 16, dtype=torch.float64))
        prefix = "language_model." if published else ""
        stored[f"{prefix}lm_head.weight"] = theirs.lm_head.weight.data
    save_file(stored, directory / "model.safetensors")
    ours = load(directory)
    tokens = torch.arange(1, 21)[None]
    expected = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert (ours(tokens) - expected).abs().max() < 1e-9
    assert ours.config.eos_token_ids == (1, 7)
    assert ours.config.tie_word_embeddings == (not has_head)
    said = notes()
    assert "tensors of multi_modal_projector and vision_tower are ignored" in said
    assert ("lm_head.weight differs from the embedding, though" in said) == has_head
