"""Records of pictures from lesson 20 on: each against an oracle of its own."""

import functools
import itertools
import json
import math
from collections import Counter

import gguf
import pytest
import torch
import transformers
from scenes import drawn, forms, places, probs_after, signed, text_of, token_texts, written

import pictures
from command_line.options import STORIES
from infer import generate
from llama import Llama, LlamaConfig
from loading.load import load_model
from pictures import replicas, runs
from pictures.scene import Bars, Cells, Lanes, Lines, Player, Tokens
from quantisation.int8 import quantize
from sampling import SamplingParams

LLAMA = "stories-llama"


def test_beams_beat_greedy_decoding():
    record, shown = drawn("beam-search")
    prompt = "The cat sat on"
    assert [text for text, _ in record.greedy] == written(prompt, max_new_tokens=5)
    finds, kept = forms(shown, Tokens)
    for line in finds.lines + kept.lines:
        ids = [runs.encode(each, 1)[0] for each in token_texts(line)]
        texts = (prompt + "".join(token_texts(line)[:at]) for at in range(len(ids)))
        total = sum(probs_after(text)[id].log().item() for text, id in zip(texts, ids))
        assert signed(line.value) == pytest.approx(total, abs=0.006)


def test_a_row_in_bytes_and_a_scale():
    record, _ = drawn("int8-weights")
    values, scale = quantize(runs.load().wte.weight)
    row = runs.encode("Once upon a time", 9)[-1]
    assert record.weights == runs.load().wte.weight[row].tolist()
    assert (record.values, record.scale) == (values[row].tolist(), scale[row].item())


@pytest.mark.parametrize("prompt", ["They went to the playground", "a butterfly", "\u00e9t\u00e9"])
def test_merges_end_in_the_tokens_of_the_word(prompt):
    record, shown = drawn("llama-3-tokenizer", prompt)
    parts = record[-1].parts
    assert parts == [runs.token_text(id) for id in runs.encode(prompt, 20)][-len(parts) :]
    for before, merge in zip(record, record[1:]):
        new = merge.parts[merge.at]
        assert new == runs.token_text(merge.id) or "\\x" in "".join(before.parts)
        assert len(merge.parts) == len(before.parts) - 1
    assert list(map(token_texts, forms(shown, Tokens)[0].lines)) == [m.parts for m in record]


@pytest.mark.parametrize("prompt", ["The dog", "Lily", "<b> &\n"])
def test_text_is_held_back(prompt):
    """What is sent and what is held is all that was written; a stop string is never sent."""
    record, shown = drawn("stop-strings", prompt)
    tokens = [step.token for step in record.steps]
    assert tokens == written(prompt, max_new_tokens=24)[: len(tokens)]
    sent = ""
    for count, step in enumerate(record.steps, 1):
        sent += step.shown
        text = "".join(tokens[:count])
        if record.stopped and count == len(tokens):  # perhaps in the middle of a token
            assert text.startswith(sent + record.stop)
        else:
            assert text == sent + step.held
        assert record.stop.startswith(step.held) and record.stop not in sent
    lines, (whole,) = (form.lines for form in forms(shown, Tokens))
    assert text_of(whole) == sent + record.end
    good = [token.text for line in lines for token in line.tokens if token.kind == "good"]
    assert "".join(good) == sent


def test_weights_lie_where_gpt_c_reads_them():
    """Input i of output o is number o % width of vector i of panel o // width."""
    record, shown = drawn("packed-weights")
    weight = runs.load().h[0].mlp.c_fc.weight[:6, :4]
    for number, panel in enumerate(record.panels):
        for at, vector in enumerate(panel):
            outputs = [4 * number + lane for lane in range(4)]
            assert vector == [(output, at) if output < 6 else None for output in outputs]
    assert len(record.panels) == 2
    assert record.sums == (weight @ torch.tensor(record.x)).tolist()
    plain, packed = forms(shown, Cells)
    cells = [cell for row in plain.rows[1:] for cell in row.cells[:-1]]
    numbers = [signed(cell.text) for cell in cells]
    assert numbers == pytest.approx((100 * weight).flatten().tolist(), abs=0.051)
    own = [cell for row in packed.rows for cell in row.cells if cell.kind.startswith("owner")]
    assert sorted(own) == sorted(cells)
    lanes = [cell.text for row in packed.rows if row.name == "sums" for cell in row.cells]
    assert lanes == [row.cells[-1].text for row in plain.rows[1:]] + ["0", "0"]


def test_trials_go_on_with_the_faster_way():
    record, shown = drawn("drafts-that-pay")
    small, large = (
        sum(weight.numel() for weight in runs.load(name).parameters())
        for name in ("stories-draft", "stories")
    )
    costs = [1 + 3 * small / large, 4 + 3 * small / large]
    assert [each.cost for each in record] == pytest.approx(costs)
    for each, form, pays in zip(record, forms(shown, Lines), (True, False)):
        assert [drafts for drafts, _ in each.steps] == [True] * 16 + [False] * 16 + [pays] * 64
        measured = [tokens for _, tokens in each.steps[:16]]
        assert each.rates == pytest.approx((sum(measured) / 16 / each.cost, 1))
        assert (each.rates[0] > 1) == pays and 1 < max(measured) <= 4
        time = sum(each.cost if drafts else 1 for drafts, _ in each.steps)
        total = sum(tokens for _, tokens in each.steps)
        assert form.curves[-1].points[-1] == pytest.approx((time, total))
    assert shown.panels[1].title.endswith(": drafts do not pay")


# Lessons from 110


def test_the_bits_of_a_block():
    """The package `gguf` writes the same bytes, and reads the same numbers."""
    record, shown = drawn("gguf-blocks")
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    data = gguf.quantize(torch.tensor([record.weights]).numpy(), q4_1)
    assert data[0].tolist() == record.data
    assert record.numbers == pytest.approx(gguf.dequantize(data, q4_1)[0].tolist(), abs=1e-7)
    head, codes = forms(shown, Cells)
    d, m = (int(row.cells[0].text.replace(" ", ""), 2) for row in head.rows)
    d, m = torch.tensor([d, m], dtype=torch.uint16).view(torch.float16).tolist()
    q = [int(row.cells[side].text, 2) for side in (1, 0) for row in codes.rows]
    assert [d * each + m for each in q] == pytest.approx(record.numbers, abs=1e-7)


def test_experts_of_each_token():
    record, shown = drawn("mixture-of-experts")
    model = runs.load("stories-experts")
    ran = {}
    hooks = [
        expert.register_forward_hook(lambda _, x, y, number=number: ran.update({number: len(y)}))
        for number, expert in enumerate(model.layers[2].mlp.experts)
    ]
    with torch.inference_mode():
        model(torch.tensor([runs.encode("".join(record.tokens), 20)]))
    for hook in hooks:
        hook.remove()
    (cells,) = forms(shown, Cells)
    taken = [sum(bool(row.cells[expert].text) for row in cells.rows) for expert in range(8)]
    assert {number: count for number, count in enumerate(taken) if count} == ran
    assert all(sum(weights.values()) == pytest.approx(1) for weights in record.weights)


def test_what_layers_with_windows_see():
    """The last logits have a gradient at the tokens that they depend on, and at no other."""
    record, shown = drawn("window-layers")
    count = len(record.tokens)
    for window, grid in zip((count, 4), forms(shown, Cells), strict=True):
        for at, row in enumerate(grid.rows):
            assert places(row, "first") == list(range(max(0, at - window + 1), at + 1))
    ids = runs.encode("".join(record.tokens), 20)
    for windows, layers in record.needed.items():
        model = Llama(LlamaConfig(n_layer=len(windows), sliding_windows=windows)).double()
        model.init_weights(0.1, torch.Generator().manual_seed(1))
        inputs = []
        for block in model.layers:
            block.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0]))
        gradients = torch.autograd.grad(model(torch.tensor([ids]))[0, -1].sum(), inputs)
        assert layers == [each[0].any(-1).tolist() for each in gradients]


def test_a_rotation_leaves_steps_for_the_others():
    """The row is an input of its layer, and the rotation is a product with a Hadamard matrix."""
    record, shown = drawn("rotated-int8")
    ids = runs.encode(pictures.PICTURES["rotated-int8"].prompt, 60)
    inputs = []
    layer = runs.load(LLAMA).get_submodule(record.layer)
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with torch.inference_mode():
        runs.load(LLAMA)(torch.tensor([ids]))
    hook.remove()
    row = inputs[0][runs.token_texts(ids).index(record.token)]
    assert record.row == pytest.approx(row.tolist(), abs=1e-5)
    matrix = torch.ones(1, 1)
    for _ in range(9):
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), matrix)
    assert record.rotated == pytest.approx((row @ matrix).tolist(), abs=1e-3)
    (table,) = forms(shown, Cells)
    few = row[record.first : record.first + 8] * 127 / row.abs().max()
    for stage in range(4):
        mixed = torch.kron(torch.eye(8 >> stage), matrix[: 1 << stage, : 1 << stage])
        said = [signed(line.cells[stage].text) for line in table.rows]
        assert said == pytest.approx((few @ mixed).tolist(), abs=0.06)


def test_blocks_of_keys_end_in_the_weights_of_transformers():
    record, shown = drawn("long-texts")
    ids = runs.encode(pictures.PICTURES["long-texts"].prompt, 60)
    ids += runs.generate_tokens(ids, max_new_tokens=128 - len(ids))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, **options)
    with torch.inference_mode():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    expected = layers[record.layer][0, record.head, -1].tolist()
    last = record.blocks[-1]
    ours = [math.exp(score - last.m) / last.total for score in record.scores]
    assert ours == pytest.approx(expected, abs=1e-5)
    _, weights = forms(shown, Lines)
    for at, ((_, now), (_, end)) in enumerate(zip(*(curve.points for curve in weights.curves))):
        later = math.prod(block.r for block in record.blocks[at // 32 + 1 :])
        assert now * later == pytest.approx(end) and end == pytest.approx(ours[at] * last.total)


def test_all_spellings_of_the_choices():
    """By hand: each way to cut a choice into tokens, a pass for each beginning."""
    record, shown = drawn("choice-trie")
    prompt = runs.encode("Lily saw a big", 60)
    choices = [text.encode() for text in record.texts]
    every = {id: runs.encoding().decode_single_token_bytes(id) for id in range(4095)}
    pieces = {id: piece for id, piece in every.items() if any(piece in each for each in choices)}
    found = dict.fromkeys(choices, (0.0, 0.0, 0))  # chances with and without the mask, spellings
    first_tokens = []

    def visit(ids: list[int], text: bytes, masked: float, own: float) -> None:
        probs = runs.next_logits(prompt + ids).double().softmax(-1)
        ways = [id for id in pieces if any(c.startswith(text + pieces[id]) for c in choices)]
        first_tokens[len(first_tokens) :] = [] if ids else ways
        end = probs[4095].item()
        mass = probs[ways].sum().item() + end * (text in choices)
        if text in choices:
            found[text] = tuple(map(sum, zip(found[text], (masked * end / mass, own * end, 1))))
        for id in ways:
            p = probs[id].item()
            visit(ids + [id], text + pieces[id], masked * p / mass, own * p)

    visit([], b"", 1.0, 1.0)
    whole = sum(own for _, own, _ in found.values())
    approx = functools.partial(pytest.approx, rel=1e-4)
    _, texts = forms(shown, Bars)
    for expected, row, drawn_as in zip(found.values(), texts.rows, record.texts.values()):
        masked, own, count = expected
        assert drawn_as == (approx(masked), approx(own / whole), count)
        assert row.parts == [(drawn_as[0], "first")] and row.tick == drawn_as[1]
    assert sorted(record.first_tokens) == sorted(pieces[id].decode() for id in first_tokens)
    (trie,) = forms(shown, Cells)
    letters = ["".join(cell.text for cell in row.cells) for row in trie.rows]
    assert letters == ["\u2423dog.end", "cat.end", "elephant.end"]  # the blank is shared


def test_what_a_schema_allows():
    """The numbers are those of the model; how many tokens are allowed, by hand where few are."""
    record, shown = drawn("json-schema")
    prompt = runs.encode(record.prompt, 60)
    text = [each.text for each in record.tokens]
    said = json.loads("".join(text[:-1]))
    assert list(said) == ["name", "age", "pet"] and 0 <= said["age"] <= 120
    assert len(said["name"]) <= 12 and said["pet"] in ("dog", "cat")
    pieces = [runs.token_text(id) for id in range(4095)]
    ends = [f'{age},"pet":"' for age in range(121)]
    for at, ways in (
        (text.index("age") + 3, ends),
        (text.index("age") + 4, [end[1:] for end in ends if end[0] == str(said["age"])[0]]),
        (text.index("et") + 4, ['dog"}', 'cat"}']),
    ):
        allowed = {piece for piece in pieces if any(way.startswith(piece) for way in ways)}
        assert record.tokens[at].allowed == len(allowed) and text[at] in allowed
    ids = [pieces.index(each) for each in text[:-1]] + [4095]
    (line,), overruled = (form.lines for form in forms(shown, Tokens))
    numbers = []
    for at, (token, each) in enumerate(zip(line.tokens, record.tokens)):
        probs = runs.next_logits(prompt + ids[:at]).softmax(-1)
        better = (probs > probs[ids[at]]).sum().item()
        assert (each.better, each.p) == (better, pytest.approx(probs[ids[at]].item(), rel=1e-3))
        expected = "kept" if each.allowed == 1 else "second" if better else "good"
        assert token == (each.text, expected, f"{each.allowed:,}")
        if expected == "second":
            numbers.append((f"token {at + 1}", f"rank {better + 1}"))
    assert [(each.name, each.value) for each in overruled] == numbers != []


def test_an_adapter_in_a_batch():
    """The text and its probabilities are those of the merged model."""
    record, shown = drawn("lora-in-a-batch")
    merged = load_model(STORIES.with_name(LLAMA), adapter=STORIES.with_name("stories-frogs"))
    ids = runs.encode("Once upon a time", 12)
    output = [token for (token,) in generate(merged, [ids], SamplingParams(24))]
    assert [each.text for each in record.tokens] == [runs.token_text(id) for id in output]
    assert record.base_texts == written("Once upon a time", LLAMA, max_new_tokens=24)
    for number, model in enumerate((runs.load(LLAMA), merged)):
        with torch.inference_mode():
            probs = model(torch.tensor([ids + output]))[0, len(ids) - 1 : -1].softmax(-1)
        own = probs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
        assert [each.probs[number] for each in record.tokens] == pytest.approx(own, abs=1e-4)
    (rows,) = forms(shown, Cells)
    assert [places(row, "second") for row in rows.rows] == [[], [4, 5, 6, 7], [], [1]]


@pytest.mark.parametrize(
    "slug, windows", [("window-pages", [64]), ("cache-groups", [None, 32])], ids=str
)
def test_pages_before_a_window_go_back(slug, windows):
    """Held: those with a position that the next token still sees, and no other."""
    record, shown = drawn(slug)
    assert [each.length for each in record] == list(range(24, 176, 24))
    for window, grid, at in zip(windows, forms(shown, Cells), range(2)):
        for row, each in zip(grid.rows, record, strict=True):
            first = max(0, each.length - window) if window else 0  # that the newest token sees
            held = [page >= first // 16 for page in range((each.length - 2) // 16 + 1)]
            assert each.tables[at] == held, (each.length, window)
            assert [cell.kind == "first" for cell in row.cells if cell.kind] == held
            assert row.value == str(sum(held))


@pytest.mark.parametrize("prompt", ["She saw a butterfly", "playground", "\u00e9t\u00e9 <"])
def test_merges_by_score_end_in_the_tokens_of_the_library(prompt):
    record, shown = drawn("sentencepiece", prompt)
    spelled = []
    for part in record.lines[-1].parts:
        single = [f"<0x{byte:02X}>" for byte in part.encode()]
        spelled += single if part in record.missing else [part]
    assert record.tokens == spelled and bool(record.missing) == ("\u00e9" in prompt)
    assert "".join(record.lines[0].parts) == f"\u2581{record.word}"
    for before, after in zip(record.lines, record.lines[1:]):
        pair = "".join(before.parts[after.at : after.at + 2])
        assert after.parts == [*before.parts[: after.at], pair, *before.parts[after.at + 2 :]]
        (id,) = runs.encoding().encode(pair.replace("\u2581", " "))
        assert after.score == -id
    merges, tokens = forms(shown, Tokens)
    assert len(merges.lines) == len(record.lines)
    assert token_texts(tokens.lines[0]) == record.tokens


# Engine, server and ranks.

RUNS = {  # slug -> the runs in its record
    "paged-cache": lambda record: [record.run],
    "preemption": lambda record: [record],
    "prefix-sharing": lambda record: [record.run],
    "chunked-prefill": lambda record: record.runs,
}


@pytest.mark.parametrize("slug", RUNS)
def test_runs_of_the_engine(slug):
    """Texts are those of `generate`, and pages of several requests hold the same."""
    record, shown = drawn(slug)
    for run in RUNS[slug](record):
        texts = [request.tokens for request in run.requests]
        size = run.setup["page_size"]
        for request in run.requests:
            prompt = "".join(runs.token_texts(request.tokens[: request.prompt_length]))
            assert runs.token_texts(request.output) == written(prompt, **vars(request.params))
        for frame in run.frames:
            held = {}
            for row in frame["running"]:
                assert len(row["pages"]) * size >= row["computed"]
                for place, page in enumerate(row["pages"]):
                    text = texts[row["number"] - 1][: row["computed"]]
                    held.setdefault(page, set()).add(tuple(text[: size * (place + 1)]))
            assert all(len(found) == 1 for found in held.values())
    (player,) = forms(shown, Player)
    assert player.frames[-1]["running"] == [] and 0 <= player.first < len(player.frames)


@pytest.mark.parametrize("slug, common", [("paged-cache", set()), ("prefix-sharing", {0, 1, 2})])
def test_pages_and_block_tables(slug, common):
    """A text is on the pages of its table, in order."""
    record, shown = drawn(slug)
    pool, tables = forms(shown, Cells)
    used = set()
    for row in record.run.frames[record.at]["running"]:
        number = row["number"]
        (table,) = (each for each in tables.rows if each.name == f"request {number}")
        pages = [int(cell.text) for cell in table.cells]
        assert pages == row["pages"]
        cells = [cell for page in pages for cell in pool.rows[page].cells]
        text = record.run.token_texts()[number - 1][: row["computed"]]
        assert [cell.text for cell in cells if cell.text] == [word.strip() for word in text]
        kinds = ["kept" if page in common else f"owner{number}" for page in pages]
        assert [cell.kind for cell in table.cells] == [cell.kind for cell in cells[::4]] == kinds
        used |= set(pages)
    for page, row in enumerate(pool.rows):
        assert (row.value == "free") == (page not in used) == (row.cells[0].kind == "idle")


NAME = "stories-llama"
PROMPT = "Once upon a time"


def outputs_are_generated(clients) -> None:
    """Each client has read what `generate` writes, or the beginning of it."""
    for client in clients:
        tokens = sum((tokens for _, tokens in client.reads), [])
        repeated = len(client.ids) // len(runs.encode(PROMPT, 20))
        own = written(PROMPT * repeated, NAME, max_new_tokens=client.count, ignore_eos=True)
        assert runs.token_texts(tokens) == own[: len(tokens)]
        assert len(tokens) == client.count or client.error


def test_a_busy_reader_misses_nothing():
    clients, scene = drawn("engine-thread")
    outputs_are_generated(clients)
    a, b = ([(step, len(tokens)) for step, tokens in client.reads] for client in clients)
    assert a == [(after, 1) for after in range(1, 9)]
    assert b == [(2, 1), (3, 1), (4, 1), (7, 3), (8, 1), (9, 1)]
    _, _, engine_b, reader_b = forms(scene, Lanes)[0].lanes
    assert [span.text for span in reader_b.spans] == ["1", "1", "1", "3", "1", "1", "busy"]
    assert [span.start for span in engine_b.spans] == list(range(1, 9))  # it did not wait


def test_two_bounds_of_the_queue():
    clients, scene = drawn("full-queue")
    outputs_are_generated(clients[:5])
    assert {client.name: client.error for client in clients if client.error} == {
        "E": "the queue is full (4 sequences): try again",
        "F, long": "the queue is full (4 prompt tokens): try again",
    }
    shown = {lane.name: [span[:3] for span in lane.spans] for lane in forms(scene, Lanes)[0].lanes}
    assert shown == {
        "A": [(0, 4, "first")],
        "B": [(0, 8, "first")],
        "C": [(1, 4, "second"), (4, 10, "first")],
        "D": [(2, 8, "second"), (8, 13, "first")],
        "E": [(3, 3, "bad")],
        "F, long": [(5, 5, "bad")],
        "F, again": [(9, 10, "second"), (10, 14, "first")],
    }


def test_engines_side_by_side():
    one_and_two, scene = drawn("replicas")
    prompt = pictures.PICTURES["replicas"].prompt
    common = {"ignore_eos": True, "temperature": 1.0}
    own = [
        written(prompt, NAME, max_new_tokens=length, seed=seed, **common)
        for seed, length in enumerate(replicas.LENGTHS)
    ]
    for count, side in enumerate(one_and_two, 1):
        assert side.texts == own and len(side.steps) == count
        for engine, steps in enumerate(side.steps):
            cells = [owner for step in steps for owner in step if owner]
            mine = range(engine + 1, 7, count)  # in turn
            assert Counter(cells) == {number: replicas.LENGTHS[number - 1] for number in mine}
    assert [panel.title for panel in scene.panels] == ["1 engine: 18 steps", "2 engines: 11 steps"]


@pytest.mark.parametrize(
    "slug", ["tensor-parallel", "split-heads", "split-vocabulary", "row-parallel"]
)
def test_cuts_are_the_whole_model(slug):
    record, scene = drawn(slug)
    assert [record.following] == written(pictures.PICTURES[slug].prompt, NAME, max_new_tokens=1)
    assert record.off["gather"] < 1e-4 and record.off.get("reduce", 0) < 1e-4
    whole = {name.split(".")[-2]: weight for name, weight in runs.load(NAME).named_parameters()}
    whole["lm_head"] = whole["embed_tokens"]
    for stage in itertools.chain(*record.parallel_modes.values()):
        if stage.kind:
            assert sum(stage.widths) == whole[stage.name].shape[stage.kind == "columns"]
        elif stage.name == "gather":
            assert stage.sent == [0, 4 * stage.widths[1]]  # rank 0 has its own
        else:  # a ring of two sends a part to the other, or two halves of the sums
            assert stage.sent == [4 * width for width in stage.widths]
    kinds = {cell.kind for row in forms(scene, Cells)[0].rows for cell in row.cells}
    assert {"owner1", "owner2", "idle"} <= kinds
