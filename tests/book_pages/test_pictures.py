"""Pictures show what the runs gave: the numbers of each caption, and records against an oracle."""

import dataclasses
import html
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import html5lib
import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

import lessons as course
from infer import generate
from loading.load import save_model
from model import causal_attention
from sampling import SamplingParams

sys.path.insert(0, str(ROOT / "course"))
import draw_picture  # noqa: E402

import pictures  # noqa: E402
from pictures import calls, gemmas, gpu_steps, render, runs, scene  # noqa: E402
from pictures.scene import Cells, Lanes, Player, Tokens  # noqa: E402

LLAMA = "stories-llama"
LARGEST = 120_000  # bytes of a picture
CAPTIONS = {  # slug -> the numbers and tokens of the caption, which are those of the run
    "lora": "108,544 numbers, 3.5 % of the weights",
    "multi-lora": "decides 8 of that request's 24 tokens, as ` frog` where ` girl` is best",
    "continuous-batching": "12 steps instead of 16 for 6 texts.",
    "gguf-k-quants": "A bit of that float16 changes 213 numbers here, a bit of a scale 32.",
    "q8-blocks": "then costs 4.2 % of the row's norm. ... the error is 1.2 %.",
    "quantised-kv-cache": "the error falls from 0.7 % to 0.5 %.",
    "kv-cache-dynamic": "10 tokens cost 85 computed positions. ... 13 are enough.",
    "kv-cache-static": "here 72 positions of 32,768 bytes. ... allocated once for 13 positions",
    "kv-cache-fix": "659 positions for 400 tokens instead of 37,888.",
    "logit-bias": "A bias of 2 takes ` dog` from 3.9 % to 23 %",
    "min-p": "nucleus of 90 % has 2,341 tokens. Min-p 0.1 keeps the 11 with",
    "multinomial": "takes it 21 % of the time ... 153 different tokens in 1,000",
    "temperature": "` big` has 96 % at T = 0.5 and 2.7 % at T = 2.",
    "top-k": "10 most likely tokens of 4,096 ... they had 12 % ... other 88 %,",
    "top-p": "1, 5, 74, 266 after these prompts.",
    "native-sampling": "needs no logarithm: 5 logarithms for a vocabulary of 4,096 tokens.",
    "token-mask": "11 that are left had 14 % ... ` dog.` gets 65 % ... it has 74 %.",
    "jump-forward": "28 tokens in 8 passes: 20 of them were",
    "json-schema": "28 tokens in the form of a schema: at 20 only one ... At 4 its",
    "show-allowed": "a single token at 2 of 4 places ... At 0 the model's own favourite",
    "speculative-decoding": "drafts 34 tokens and the large one accepts 28: 40 tokens in 12 passes",
    "gguf-blocks": "Q4_1 holds 32 numbers in 20 bytes ... largest error in this block is 0.0082.",
    "mixture-of-experts": "2 of 8 experts ... expert 6 is taken most often, by 8 of 15",
    "init": "` very` looks back at ` lost`, and the answer turns from ` happy` to ` sad`.",
    "eos-handling": "It reaches 0.1 % at 3 of 206 places. At the last",
    "context-window": "last 256 tokens ... ` upon` stands at position 1, then 0,",
    "byte-level-bpe": "9, 11 and 17 of them here.",
    "sentencepiece": "`butterfly` becomes 1 token in 9 merges.",
    "gguf-rope": "the text goes on, from token 9 on as another one.",
    "qk-norm": "one of 13 keys goes from 15 % of the softmax to 100 %.",
    "llama-3-tokenizer": "` playground` becomes 1 token in 10 merges.",
    "llama": "\u22121.20 at distance 2, \u22121.61 at 32",
    "control-tokens": "make 1 control token; the text encoded as one string would have 2.",
    "load-generator": "stalls for 1 s. ... counts 1 of 84 requests as late. ... counts 15 of 100.",
    "fp16-bf16": "float16 is off by 0.00079 and ends at 65,504; bfloat16 is off by 0.007",
    "int8-weights": "A row of 256 weights takes 260 bytes instead of 1,024",
    "length-bucketing": "the longest one has: 50 here. ... reads 18. The texts have 17 pages.",
    "preemption": "happens 2 times, and 7 positions are computed twice.",
    "prefix-caching": "4 texts need 11 pages instead of 20.",
    "chunked-prefill": "more than 8 tokens instead of 41 ... in step 9 instead of 3.",
    "presence-penalty": "by 1, however ... Here `.` falls behind ` and`.",
    "frequency-penalty": "lowers the logit of a token by 0.5 ... Here ` a` falls behind ` many`.",
    "repetition-penalty": "divides the logit ... by 1.3 ... Here ` big` falls behind ` new`.",
    "tensor-parallel": "the other half, 1,408 bytes a token in each layer.",
    "sharded-attention": "attends with 3 of 6 query heads, and its KV cache holds 1 of "
    "2 key heads.",
    "vocab-parallel": "the next token, `.`.",
    "row-parallel": "1,536 bytes a token in each layer instead of 2,176.",
    "sharded-loading": "the whole 15.7 MB: of two ranks each holds at most 7.9 MB, of "
    "three 5.7 MB.",
    "replicas": "11 steps instead of 18 for 6 texts.",
    "prefix-aware-routing": "108 positions instead of 60 when engines take turns.",
    "autoscaling": "5 seconds late: one for every 4 requests on average. ... all 52 "
    "texts are whole.",
    "length-penalty": "1 token with \u22121.95. ... 22 tokens win: \u22120.67 a token",
    "top-p-without-sorting": "4,096 tokens race ... ` happy` is drawn after 3 questions.",
    "beam-search": "a text 2.5 times as probable as greedy decoding\u2019s.",
    "prompt-lookup": "8 of 9 drafts are accepted: 16 tokens in 8 passes.",
    "online-softmax": "2 of 3 later blocks had a larger one ... first block are 20 % of what",
    "stop-tokens": "with at least 30 tokens the model wanted it 8 times",
    "stop-strings": "the beginning of the stop string `a big bag.` is held back.",
    "logprobs": "is ` always`, with 2.2 %. The perplexity of these 16 tokens is 2.47.",
    "engine-thread": "joined into one update of 3 tokens.",
    "draining": "4 texts may go on, waiting ones too. 2 of them end in time",
    "rotated-int8": "20 times the root ... |x| is 1 step. ... median becomes 58 steps.",
    "kv-cache-groups": "After 168 tokens it holds 11 and 3. A sliding-window layer has 25 %",
    "gemma": "Layer 5 sees 11 tokens, the others 4, ... 1,000,000 instead of 10,000. ... to 1.00",
    "tool-calls": "of 61 tokens jump-forward writes 59, ... decides 2 ... in 2 passes. ... 40",
    "prefix-lru": "30 pages are written, and 22 files stay. ... last 8 pages, ... 32 positions",
    "thinking-budget": "After 8 tokens ... `</think>` ... 16 tokens in 9 passes, as 7 are forced. "
    "... 24 of 24 tokens",
    "static-shapes": "5 sequences launch 583 to 718 ... 472 ... 8 sequences and 4 or 8 pages "
    "... In step 26 it reads 64 pages; ... 17.",
    "captured-step": "8 requests has 460 launches, 2 uploads and 4 syncs ... 484 ... 1 upload "
    "and 1 sync. ... 1 launch.",
    "sliding-window-pages": "After 168 tokens it holds 5.",
    "sliding-window-attention": "leaves 38 of 66 scores. ... the last 7 tokens. ... on all 11",
}


def drawn(slug: str, prompt: str | None = None):
    """The record of a picture and its scene. prompt: None is that of the book."""
    return pictures.recorded(slug, prompt), pictures.scene_of(slug, prompt)


def draw(*args) -> int:
    return draw_picture.main(list(args))


def forms(scene, kind: type) -> list:
    return [panel.form for panel in scene.panels if isinstance(panel.form, kind)]


def token_texts(line) -> list[str]:
    return [token.text for token in line.tokens]


def signed(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def text_of(line) -> str:
    return "".join(token_texts(line))


def written(prompt: str, name: str = "stories", **params) -> list[str]:
    return runs.token_texts(runs.generate_tokens(runs.encode(prompt, 200), name, **params))


def probs_after(text: str, temperature: float = 1.0):
    """The model's probabilities of the next token, by a pass of its own, in float64."""
    with torch.inference_mode():
        logits = runs.load()(torch.tensor([runs.encode(text, 300)]))[0, -1]
    return (logits.double() / temperature).softmax(dim=-1)


def tree_of(shown: str):
    """Strict: it fails for HTML that is not valid."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parseFragment(f"<div>{shown}</div>")


def kinds_of(form) -> set[str]:
    if isinstance(form, scene.Player | scene.Axis):
        return set()
    if dataclasses.is_dataclass(form):
        form = [getattr(form, each.name) for each in dataclasses.fields(form)]
    found = {form.kind} if hasattr(form, "kind") else set()
    if isinstance(form, scene.Bar):
        found |= {kind for _, kind in form.parts}
    elif isinstance(form, list | tuple):
        found |= {kind for part in form if not isinstance(part, str) for kind in kinds_of(part)}
    return found


def check(drawn_scene: scene.Scene, shown: str) -> None:
    assert 40 < len(drawn_scene.caption) < 330 and drawn_scene.caption.endswith(".")
    said = {"", "first"}.union(*(panel.key for panel in drawn_scene.panels))
    for panel in drawn_scene.panels:
        assert panel.title and not panel.title.endswith(".")
        used = kinds_of(panel.form)
        assert used | set(panel.key) <= set(scene.KINDS)
        named = {curve.kind for curve in getattr(panel.form, "curves", ()) if curve.name}
        unsaid = {kind for kind in used - said - named if not kind.startswith("owner")}
        assert not unsaid or len(used) < 3, panel.title
    tree = tree_of(shown)
    for chart in (part for part in tree.iter() if str(part.tag).endswith("svg")):
        assert chart.get("aria-hidden") == "true" and float(chart.get("width")) <= 320
    assert not re.search(r"\bnan\b|\binf\b|\ufffd", shown) and len(shown.encode()) < LARGEST


def numbers(text: str) -> list[str]:
    """The numbers and the quoted tokens of a caption."""
    return re.findall(r"`[^`]*`|\d+(?:[.,]\d+)*", text.replace("\u00a0", " "))


@pytest.mark.parametrize("slug", sorted(pictures.PICTURES))
def test_each_picture(slug):
    shown = pictures.figure(f"00-{slug}")
    drawn_scene = pictures.scene_of(slug)
    check(drawn_scene, shown)
    shown_numbers = iter(numbers(drawn_scene.caption))
    assert all(number in shown_numbers for number in numbers(CAPTIONS.get(slug, "")))  # in order
    command = f"python lessons.py picture 00 --prompt {pictures.PICTURES[slug].prompt[:1]}"
    assert command in html.unescape(shown).replace("--prompt '", "--prompt ")


# The forms


def test_what_is_drawn_is_also_said():
    """What screen readers skip (bars, squares, curves) stands beside it as text."""
    spans = [scene.Span(1, 3, "first", "writes"), scene.Span(4, 4, "bad")]
    curve = scene.Curve("mine", [(0, 1.0), (2, 3.5)], "first")
    bars = [scene.Bar("`<a>\n`", [(1, "first"), (3, "bad")], "4 in all", tick=2)]
    panels = [
        scene.Panel(
            "Lanes",
            scene.Lanes([scene.Lane("A", spans)], scene.Axis("step")),
            key={"first": "at work", "bad": "it ends"},
        ),
        scene.Panel("Chart", scene.Lines([curve], scene.Axis("step"), scene.Axis("rate"))),
        scene.Panel("Bars", scene.Bars(bars)),
        scene.Panel("Cells", scene.Cells([scene.Row("r", [scene.Cell("first")] * 2, "2")])),
    ]
    tree = tree_of(render.picture(scene.Scene("c", *panels)))
    for part in list(tree.iter()):
        for child in list(part):
            if child.get("aria-hidden"):
                part.remove(child)
    said = "".join(tree.itertext())
    for words in ("writes, step 1 to 3; ", "it ends, step 4; ", "1 at 0, 3.5 at 2", "4 in all"):
        assert words in said
    assert "<a>\\n" in said and len(list(tree.iter("table"))) == 4
    widths = [part.get("style") for part in tree.iter("i") if part.get("style")]
    assert widths[-2:] == ["width:25.00%", "width:75.00%"]


def test_a_character_of_several_tokens_is_shown_whole():
    ids = runs.encode("a \u00e9\u00e8 \U0001f680", 40)
    assert len(ids) > 6 and "".join(runs.token_texts(ids)) == "a \u00e9\u00e8 \U0001f680"
    assert "\ufffd" not in "".join(map(runs.token_text, ids))


# The command


def test_a_picture_of_the_reader_s_own_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert draw("01-greedy-decoding", "--prompt", "Tom <and>") == 0
    path = tmp_path / "picture-01-greedy-decoding.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text("utf-8")
    html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    assert "http" not in page and "src=" not in page
    assert "--prompt 'Tom <and>'" in html.unescape(page)
    first, *_ = forms(drawn("greedy-decoding", "Tom <and>")[1], scene.Tokens)[0].lines
    assert text_of(first).startswith("Tom <and>")


SLOW = {"eos-handling", "context-window", "kv-cache-fix"}


@pytest.mark.parametrize("slug", sorted(set(pictures.PICTURES) - SLOW))
def test_odd_prompts(slug, prompt="<\u00e9"):
    """Few tokens, those of no story, parts of a character, and what HTML would take for its own."""
    check(pictures.scene_of(slug, prompt), pictures.figure(f"00-{slug}", prompt))


@pytest.mark.parametrize(
    "args, words",
    [
        ("16-variable-batching --prompt Tom", "shows 2 to 8"),
        ("01-greedy-decoding --prompt " + "a" * 90, "this picture shows 1 to "),
        ("01-greedy-decoding --prompt=", "the prompt has 0 tokens"),
        ("07-top-p --prompt \udcff", "--prompt '\\udcff': not UTF-8 text"),
        ("99-nothing", "99-nothing has no picture"),
        ("07-top-p --output x.svg", "07-top-p has no picture as SVG"),
        ("00-init --output nowhere/x.html", "nowhere/x.html"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    assert draw(*args.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())


# The cards of the Readme

CARDS = ("18-speculative-decoding", "42-continuous-batching")


def test_each_picture_is_of_a_lesson_and_each_card_is_checked():
    _, lessons = course.read_main()
    assert set(pictures.PICTURES) <= {lesson.slug for lesson in lessons}
    with_card = {slug for slug, each in pictures.PICTURES.items() if each.card}
    assert {id.partition("-")[2] for id in CARDS} == with_card


@pytest.mark.parametrize("id", CARDS)
def test_cards(id):
    file = pictures.HERE / f"{id}.svg"
    text = pictures.svg_of(id)
    assert file.read_text("utf-8") == text
    assert f"](course/pictures/{file.name})" in (ROOT / "Readme.md").read_text("utf-8")
    tree = ElementTree.fromstring(text)
    width, height = (float(tree.get(name)) for name in ("width", "height"))
    for box in tree.findall("{*}rect"):
        x, y, wide, high = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x and x + wide <= width and 0 <= y and y + high <= height
    for words in tree.findall("{*}text"):
        assert float(words.get("x")) + float(words.get("textLength", 0)) <= width


# Lessons 00 to 03


def test_a_pass():
    """With the record's weights in the place of torch's attention the result is the same."""
    record, _ = drawn("init")
    ids = [id for _, id in record.tokens]
    model = runs.load()
    seen = []

    def attend(layer, q, k, v):
        attended = causal_attention(layer, q, k, v)
        if layer == record.layer - 1:
            own = torch.tensor(record.attention) @ v[0, :, record.head - 1]
            seen.append((own, attended[0, :, record.head - 1]))
        return attended

    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
        vectors = model.wte.weight[ids] + model.wpe.weight[: len(ids)]
    ((own, real),) = seen
    assert own.allclose(real, atol=1e-4)
    assert torch.tensor(record.vectors).equal(vectors[:, :12])
    probs = probs_after(pictures.PICTURES["init"].prompt).topk(5).values.tolist()
    assert [p for _, p, _ in record.top] == pytest.approx(probs, rel=1e-4)
    assert record.after[-1][0] == pytest.approx(probs[0], rel=1e-4) and len(record.after) == 17


def test_steps_of_greedy_decoding():
    steps, shown = drawn("greedy-decoding")
    tokens = written("Once upon a time", max_new_tokens=len(steps))
    assert [step.choices[0][0] for step in steps] == tokens
    for at, line in enumerate(forms(shown, scene.Tokens)[0].lines):
        assert text_of(line) == "Once upon a time" + "".join(tokens[: at + 1])


# Lessons 04 to 07


# Lessons 09 to 12


# Lessons 13 to 18


# Lesson 42


def test_batches_have_each_token_once():
    record, shown = drawn("continuous-batching")
    sizes = [3, 9, 5, 4, 7, 3]
    for steps, grid in zip((record.static, record.continuous), forms(shown, scene.Cells)):
        taken = [number for step in steps for number in step if number]
        assert [taken.count(number) for number in range(1, 7)] == sizes
        for number in range(1, 7):  # one row each
            assert len({step.index(number) for step in steps if number in step}) == 1
        cells = [[int(cell.text or 0) for cell in row.cells] for row in grid.rows]
        assert cells == [[number or 0 for number in row] for row in zip(*steps)]
    assert len(record.static) == 9 + 7 and len(record.continuous) == 12
    for at, step in enumerate(record.continuous):  # no row is idle while a request waits
        waiting = set(range(1, 7)) - {n for early in record.continuous[: at + 1] for n in early}
        assert None not in step or not waiting
    for seed, (text, length) in enumerate(zip(record.run.token_texts(), sizes)):
        params = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0, "seed": seed}
        assert text == ["Lily", *written("Lily", **params)]
    (player,) = forms(shown, scene.Player)
    assert len(player.frames) == len(record.continuous)
    assert player.setup["texts"] == dict(enumerate(record.run.token_texts(), 1))
    script = pictures.PLAYER.read_text("utf-8")
    assert script in pictures.page("42-continuous-batching")
    assert script not in pictures.page("07-top-p")
    computed = sum(runs.num_scheduled_tokens(frame, 0) for frame in player.frames)
    assert computed == player.frames[-1]["positions"]


# Lessons from 20 on.


@pytest.mark.parametrize("prompt", ["The dog", "Lily", "<b> &\n"])
def test_text_is_held_back(prompt):
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


# Lessons from 110


def test_layers_of_a_gemma_are_those_of_transformers(tmp_path):
    """What the last token sees, the angles of each layer, and the RMS around each norm."""
    record, shown = drawn("gemma")
    save_model(gemmas.make_model(), tmp_path)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    sizes = [{} for _ in record.layers]
    weights = []

    def watch(layer: int, name: str, module) -> None:
        def note(_, args, output):
            if isinstance(output, tuple):
                output, attention = output
                weights.append(attention[0, :, -1].sum(dim=0))  # of all heads
            sizes[layer][name] = output[0, -1].square().mean().sqrt().item()

        module.register_forward_hook(note)

    for layer, block in enumerate(theirs.model.layers):
        for name, module in block.named_children():
            watch(layer, name, module)
        watch(layer, "output", block)
    with torch.inference_mode():
        theirs(torch.tensor([runs.encode(pictures.PICTURES["gemma"].prompt, 20)]))
    config = theirs.config
    for layer, each in enumerate(record.layers):
        assert len(sizes[layer]) == 7 and each.visible == (weights[layer] > 0).tolist()
        for name, size in sizes[layer].items():
            assert each.sizes[name] == pytest.approx(size, rel=1e-4)
        before = record.layers[layer - 1].sizes["output"] if layer else each.sizes["input"]
        assert each.sizes["input"] == before
        theta = config.rope_parameters[config.layer_types[layer]]["rope_theta"]
        angles = [theta ** (-pair / 32) for pair in range(32)]
        assert each.angles == pytest.approx(angles, rel=1e-4)
        row = forms(shown, Cells)[0].rows[layer]
        assert [cell.kind != "idle" for cell in row.cells] == each.visible
    assert config.layer_types.index("full_attention") == gemmas.GLOBAL


def test_a_group_holds_the_pages_that_its_layers_may_read():
    """An entry stays while the next token sees a position of its page."""
    record, shown = drawn("kv-cache-groups")
    assert [each.length for each in record.steps] == list(range(5, 176))
    for each in record.steps:
        computed = range(each.length - 1)
        for table, window in zip(each.tables, (None, 32)):
            seen = computed if window is None else computed[-(window - 1) :]
            held = [page is not None for page in table]
            assert held == [place in {at // 16 for at in seen} for place in range(len(table))]
            pages = [page for page in table if page is not None]
            assert len(set(pages)) == len(pages) and len(table) == -(-(each.length - 1) // 16)
    full, sliding = record.pool_sizes
    assert {page for each in record.steps for page in each.tables[1]} == {None, *range(sliding)}
    assert record.bytes[1] * full == 5 * record.bytes[0] * sliding  # five layers, one
    for group, grid in enumerate(forms(shown, Cells)):
        for row in grid.rows:
            (each,) = [each for each in record.steps if str(each.length) == row.name]
            cells = [int(cell.text) if cell.text else None for cell in row.cells]
            table = each.tables[group]
            assert cells == table + [None] * (len(cells) - len(table))


def test_a_round_of_a_tool_call(monkeypatch):
    """Without jump-forward the call has the same tokens; the grammar changes no text."""
    record, shown = drawn("tool-calls")
    call, reply = record.call, record.reply
    text = "".join(token.text for token in call.tokens)
    body = re.fullmatch(r"<tool_call>(.*)</tool_call><\|endoftext\|>", text)[1]
    assert json.loads(body) == {"name": "find_toy", "arguments": record.arguments}
    assert record.result == calls.find_toy(**record.arguments)
    assert {*map(calls.kind_of, call.tokens)} == {"second", "third"}
    assert call.passes == sum(calls.kind_of(token) != "second" for token in call.tokens)
    ids = [token.id for token in call.tokens]
    for at, token in enumerate(call.tokens):  # by a pass of its own
        best = runs.next_logits(call.prompt + ids[:at], LLAMA).argmax().item()
        assert token.wanted == runs.token_text(best)
    tokens = [token.id for token in reply.tokens]
    assert tokens == runs.generate_tokens(reply.prompt, LLAMA, max_new_tokens=len(tokens))
    assert reply.passes == len(tokens) and {*map(calls.kind_of, reply.tokens)} == {"good"}
    assert text.removesuffix("<|endoftext|>") in runs.encoding().decode(reply.prompt)
    monkeypatch.setattr("infer.single_allowed_token", lambda token_mask: None)
    again = calls.record_round(pictures.PICTURES["tool-calls"].prompt)
    assert [token.id for token in again.call.tokens] == ids and again.call.passes == len(ids)
    lines, message = (form.lines for form in forms(shown, Tokens))
    assert [text_of(line) for line in lines[1::3]] == [text, "".join(runs.token_texts(tokens))]
    assert json.loads(text_of(message[2])) == record.arguments


def test_the_last_pages_of_the_least_recently_used_prompt_are_removed():
    record, shown = drawn("prefix-lru")
    before, after = (stage.order for stage in record.stages[2:])
    last_first = {name: [(name, index) for index in reversed(range(10))] for name in "ABC"}
    assert before == last_first["B"] + last_first["A"]
    assert after == last_first["B"][8:] + last_first["A"] + last_first["C"]
    found = [(each.name, each.cached) for each in record.stages + record.restarts]
    assert found[:4] == [("A", 0), ("B", 0), ("A", 160), ("C", 0)]
    assert found[4:] == [("C", 160), ("A", 160), ("B", 32)]
    for grid, order in zip(forms(shown, Cells), (before, after)):
        drawn_pages = {
            (row.name, index): int(cell.text)
            for row in grid.rows
            for index, cell in enumerate(row.cells)
            if cell.text
        }
        assert sorted(drawn_pages, key=drawn_pages.get) == order
        assert sorted(drawn_pages.values()) == list(range(1, len(order) + 1))
    grid, _ = forms(shown, Cells)
    removed = [cell.text for row in grid.rows for cell in row.cells if cell.kind == "bad"]
    assert removed == list("87654321")


def test_a_budget_ends_the_reasoning_and_a_constraint_makes_the_answer():
    record, shown = drawn("thinking-budget")
    *limited, free = record.replies
    assert free.ids == runs.generate_tokens(record.prompt, LLAMA, max_new_tokens=24)
    assert {token.part for token in free.tokens} == {"reasoning"} and free.passes == 24
    forced = runs.encode("</think>", 10)
    for reply in limited:
        before = free.ids[: reply.budget] + forced
        prompt = record.prompt + before
        params = SamplingParams(10, choices=("Yes.", "No."))
        steps = generate(runs.load(LLAMA), [prompt], params, encoding=runs.encoding())
        answer = [id for (id,) in steps]
        assert reply.ids == before + answer and reply.reasoning_tokens == reply.budget
        assert reply.passes == sum(token.allowed > 1 for token in reply.tokens)
        text = runs.encoding().decode(reply.ids)
        thought, end, said = text.removesuffix("<|endoftext|>").partition("</think>")
        assert end and "".join(reply.message.reasoning) == thought.strip()
        assert "".join(reply.message.content) == said and said in ("Yes.", "No.")
        assert (reply.finish_reason, free.finish_reason) == ("stop", "length")
    lines, message = (form.lines for form in forms(shown, Tokens))
    replies = [runs.encoding().decode(reply.ids) for reply in record.replies]
    assert [text_of(line) for line in lines[1:]] == replies
    for line, reply in zip(lines[1:], record.replies):
        kinds = [token.kind for token in line.tokens]
        answer = ["second" if token.allowed == 1 else "third" for token in reply.tokens]
        count = reply.reasoning_tokens
        assert kinds == ["good"] * count + answer[count:]
    assert text_of(message[2]) == "8"


SAMPLED = {"temperature": 0.8, "ignore_eos": True}


def test_static_steps_have_one_batch_and_the_pages_of_varying_ones():
    record, shown = drawn("static-shapes")
    for seed, prompt in enumerate(record.prompts):
        tokens = runs.generate_tokens(prompt, LLAMA, max_new_tokens=30, seed=seed, **SAMPLED)
        assert record.varying_outputs[seed] == record.static_outputs[seed] == tokens
    assert len(record.varying) == len(record.static) == 29
    launches = {}
    for at, (varying, static) in enumerate(zip(record.varying, record.static)):
        lengths = [len(prompt) + at + 1 for prompt in record.prompts]
        counts = [-(-length // 16) for length in lengths]
        own = [table[:count] for table, count in zip(static.tables, counts)]
        pages = sum(own, [])
        assert len(set(pages)) == len(pages)
        assert static.numbers == [0, 1, 2, 3, 4, 4, 4, 4]
        assert static.shape == (8, 4 if max(counts) in (3, 4) else 8)
        assert varying.new_pages == [
            table[-1] for table, length in zip(own, lengths) if length % 16 == 1
        ]
        alike = [{counts[number].bit_length() for number in b.numbers} for b in varying.batches]
        assert [len(each) for each in alike] == [1] * len(set().union(*alike))
        assert sorted(sum((b.numbers for b in varying.batches), [])) == [0, 1, 2, 3, 4]
        for batch, width in [(static, static.shape.num_pages)] + [
            (batch, max(counts[number] for number in batch.numbers)) for batch in varying.batches
        ]:
            for number, table in zip(batch.numbers, batch.tables):
                assert table == own[number] + own[number][-1:] * (width - counts[number])
        launches.setdefault(len(varying.batches), set()).add(varying.launches)
    assert len({step.launches for step in record.static}) == 1
    assert set(launches) == {2, 3} and min(launches[3]) > max(launches[2])
    left, right = forms(shown, Cells)
    assert [[int(cell.text) for cell in row.cells] for row in right.rows] == record.static[
        25
    ].tables
    tables = [b.tables for at in (9, 25) for b in record.varying[at].batches]
    cells = [[int(cell.text) for cell in row.cells if cell.text] for row in left.rows if row.name]
    assert cells == sum(tables, [])
    new = [row.cells[-1].text or row.cells[-2].text for row in (left.rows[4], left.rows[-1])]
    assert [int(text) for text in new] == [
        page for at in (9, 25) for page in record.varying[at].new_pages
    ]


def test_operations_of_a_step():
    """A graph runs the kernels of the eager step, and the tokens are those of `generate`."""
    records, shown = drawn("captured-step")
    prompt = runs.encode(pictures.PICTURES["captured-step"].prompt, 12)
    for record in records:
        for seed, output in enumerate(record.outputs):
            params = SAMPLED | {"max_new_tokens": 4, "seed": seed, "top_p": 0.9}
            assert output == runs.generate_tokens(prompt, LLAMA, **params)
        counted = {name: record.operations.count(name) for name in gpu_steps.COUNTERS}
        assert counted == record.counts
    _, one_upload, eager, replayed = records
    for record in (one_upload, eager, replayed):
        assert record.operations[0] == "uploads" and record.operations[-1] == "syncs"
        assert len(set(record.operations[1:-1])) == 1
    assert replayed.captured == eager.counts["launches"] and not eager.captured
    lanes, large = forms(shown, Lanes)
    for lane, record in zip(lanes.lanes, records):
        for name, kind in gpu_steps.KINDS.items():
            spans = [span for span in lane.spans if span.kind == kind]
            assert sum(max(span.end - span.start, 1) for span in spans) == record.counts[name]
    assert [span.text for span in large.lanes[0].spans] == ["upload", "replay", "sync"]


# Engine, server and ranks.

RUNS = {  # slug -> the runs in its record
    "paged-cache": lambda record: [record.run],
    "preemption": lambda record: [record],
    "prefix-caching": lambda record: [record.run],
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


@pytest.mark.parametrize("slug, common", [("paged-cache", set()), ("prefix-caching", {0, 1, 2})])
def test_pages_and_block_tables(slug, common):
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
    for client in clients:
        tokens = sum((tokens for _, tokens in client.reads), [])
        repeated = len(client.ids) // len(runs.encode(PROMPT, 20))
        own = written(PROMPT * repeated, NAME, max_new_tokens=client.count, ignore_eos=True)
        assert runs.token_texts(tokens) == own[: len(tokens)]
        assert len(tokens) == client.count or client.error


def test_a_busy_reader_misses_nothing():
    clients, shown = drawn("engine-thread")
    outputs_are_generated(clients)
    a, b = ([(step, len(tokens)) for step, tokens in client.reads] for client in clients)
    assert a == [(after, 1) for after in range(1, 9)]
    assert b == [(2, 1), (3, 1), (4, 1), (7, 3), (8, 1), (9, 1)]
    _, _, engine_b, reader_b = forms(shown, Lanes)[0].lanes
    assert [span.text for span in reader_b.spans] == ["1", "1", "1", "3", "1", "1", "busy"]
    assert [span.start for span in engine_b.spans] == list(range(1, 9))  # it did not wait


def test_two_bounds_of_the_queue():
    clients, shown = drawn("queue-limits")
    outputs_are_generated(clients[:5])
    assert {client.name: client.error for client in clients if client.error} == {
        "E": "the queue is full (4 sequences): try again later",
        "F, long": "the queue is full (4 prompt tokens): try again later",
    }
    shown = {lane.name: [span[:3] for span in lane.spans] for lane in forms(shown, Lanes)[0].lanes}
    assert shown == {
        "A": [(0, 4, "first")],
        "B": [(0, 8, "first")],
        "C": [(1, 4, "second"), (4, 10, "first")],
        "D": [(2, 8, "second"), (8, 13, "first")],
        "E": [(3, 3, "bad")],
        "F, long": [(5, 5, "bad")],
        "F, again": [(9, 10, "second"), (10, 14, "first")],
    }
