"""The pictures of compiled code and of benchmarks show what the runs gave, and the rows."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run
from drawings import caption_of, drawn, number, of_class, tokens_of, tree_of, widths, words_of


def columns_of(table) -> list[list[str]]:
    """The texts of the cells of each row of a table."""
    cells = ("th", "td")
    return [[words_of(cell) for cell in row if cell.tag in cells] for row in table.iter("tr")]


def named(element, tag: str) -> list:
    """Its parts of that name, in HTML or in SVG."""
    return [part for part in element.iter() if str(part.tag).rpartition("}")[2] == tag]


# Benchmarks


ENDS = "first", "second"
ENGINES = "cache", "native int8"


# Compiled code


def first_input(prompt: str) -> torch.Tensor:
    """What goes into the first MLP at the last position, (C,)."""
    from book.recordings import encoding, load

    model = load()
    ids = encoding().encode(prompt)
    kept = []

    def attend(layer, q, k, v):
        from model import causal_attention

        kept.append(causal_attention(layer, q, k, v))
        return kept[-1]

    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
        block = model.h[0]
        x = model.wte.weight[ids] + model.wpe.weight[: len(ids)]
        attended = kept[0].transpose(1, 2) if kept[0].shape[1] != len(ids) else kept[0]
        x = x + block.attn.c_proj(attended.reshape(1, len(ids), -1))[0]
        return block.ln_2(x)[-1]


def test_sums_in_three_orders():
    """Whole numbers give one sum, that of int8.py; and C gives torch's bits."""
    from book.recordings import load
    from int8 import int8_linear, quantize

    record, tree = drawn("native-int8")
    x = first_input("One day")
    w = load().h[0].mlp.c_fc.weight[0].detach()
    x_values, w_values = (quantize(each)[0].tolist() for each in (x, w))
    assert record.x == x_values[:4] and record.w == w_values[:4]
    total = sum(a * b for a, b in zip(x_values, w_values))
    assert [whole for _, _, whole in record.orders] == [total] * 3
    for _, rounded, _ in record.orders:
        assert rounded == pytest.approx((x.double() @ w.double()).item(), abs=1e-5)
    values, scale = quantize(w[None])
    assert record.torch == int8_linear(x[None], values, scale).item() == record.native
    assert record.torch == pytest.approx(total * record.scale, rel=1e-6)
    four, table = of_class(tree, "div", "panel")
    rows = [[number(cell) for cell in row[1:]] for row in columns_of(four)]
    assert [a * b for a, b in zip(*rows[:2])] == rows[2] and rows[3] == [sum(rows[2])]
    shown = [[number(cell) for cell in row[1:]] for row in columns_of(table)[1:]]
    assert [row[1] for row in shown] == [total] * 3
    assert [row[0] for row in shown] == pytest.approx([each[1] for each in record.orders], abs=1e-8)


def test_what_computes_is_the_rule_of_the_lesson():
    """C for int8 weights on a CPU alone, and the line that its Try prints."""
    import lessons as course

    record, tree = drawn("native-backend")
    torch_alone = ("torch", "error", "torch")
    expected = {
        "CPU, int8": ("C", "C", "torch"),
        "CPU, float32": torch_alone,
        "CPU, bfloat16": torch_alone,
        "GPU, int8": torch_alone,
        "CPU, int8, no compiler": ("torch", "torch", "torch"),
    }
    for choice, (place, answers) in zip(record.choices, expected.items(), strict=True):
        assert choice.place == place and list(choice.backends) == ["auto", "native", "torch"]
        assert tuple(answer for answer, _ in choice.backends.values()) == answers
        for backend, (answer, words) in choice.backends.items():
            lacks = place.endswith("no compiler") and backend != "torch"
            assert bool(words) == (answer == "error" or lacks)
    _, lessons = course.read_main()
    said = course.message(course.find(lessons, "native-backend"))
    line = record.choices[2].backends["native"][1]
    assert f"infer.py: error: {line}\n" in said and line.endswith("not cpu and bfloat16")
    note = record.choices[4].backends["auto"][1]
    assert note.startswith("note: there is no C compiler; ")
    assert note.endswith("; torch computes instead")
    rows = list(of_class(tree, "table", "choices")[0].iter("tr"))[1:]
    shown = [tuple(code.text for code in row.iter("code")) for row in rows]
    assert shown == list(expected.values())
    (said,) = of_class(tree, "ol", "said")
    notes = {words for choice in record.choices for _, words in choice.backends.values() if words}
    assert {words_of(line) for line in said} == notes


def test_both_backends_write_the_same_tokens():
    from book.recordings import encoding
    from loading.load import load_model

    record, tree = drawn("native-backend")
    ids = encoding().encode("Once upon a time")
    model = load_model(ROOT / "checkpoints" / "stories", torch.int8)
    own = [token for (token,) in run(model, [ids], max_new_tokens=12)]
    assert record.texts["torch"] == [encoding().decode([token]) for token in own]
    (table,) = of_class(tree, "table", "rows")
    assert record.texts["torch"] == record.texts["C"] == tokens_of(table, "new")
    assert "".join(record.texts["C"]).startswith(", there was a little girl named Lily.")


def test_weights_are_read_in_two_orders():
    """Each line once, with the sums of torch's product; the speeds are those of the message."""
    import lessons as course
    from book.recordings import load

    record, tree = drawn("native-linear")
    model = load()
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.wpe.weight.numel()
    assert record.bytes == 4 * weights
    fast, slow = record.orders
    assert fast.lines == list(range(64))
    assert slow.lines == [16 * row + line for line in range(16) for row in range(4)]
    _, lessons = course.read_main()
    said = " ".join(course.message(course.find(lessons, "native-linear")).split())
    assert f"speed ({slow.speed} GB/s instead of {fast.speed}, when this code" in said
    sums = F.linear(first_input("Once upon a time"), model.h[0].mlp.c_fc.weight[:4])
    for order, part, kind in zip(record.orders, of_class(tree, "div", "panel"), ("good", "bad")):
        assert order.sums == pytest.approx(sums.tolist(), abs=1e-4)
        texts = [words_of(text) for text in named(part, "text")]
        assert [number(text) for text in texts[1:8:2]] == pytest.approx(sums.tolist(), abs=6e-3)
        assert words_of(part).startswith(f"{order.name}: ")
        (line,) = of_class(part, "polyline", kind)
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert [int(y * 64 / (4 * 36)) for _, y in points] == order.lines
        assert [int((x - 44) * 64 / 240) for x, _ in points] == list(range(64))
        beside = sum(b - a == 1 for a, b in zip(order.lines, order.lines[1:]))
        assert f"beside the last one {beside} of 63 times" in words_of(part)
    note = words_of(of_class(tree, "p", "note")[-1])
    assert f"came at {fast.speed} GB/s one row after the other, at {slow.speed} with 4 rows" in note
    assert f"multiplied with {4 * weights / 1e6:.1f} MB of weights" in caption_of("native-linear")
    assert "for few tokens C reads a row to its end" in caption_of("native-linear")
    assert "With eight rows of x or more arithmetic takes longer" in said  # then two at once


def words(elements) -> list[str]:
    return [words_of(element) for element in elements]


def names_called(name: str) -> tuple[list[str], int]:
    """What Python calls in one decode step in torch, and how many operators that are."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from book.recordings import encoding, load
    from cache import KVCache
    from infer import next_logits

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    names = []
    asked = []
    model = load(name)
    text = encoding().encode("Once upon a time")
    with torch.inference_mode():
        cache = KVCache(model, 1, 5)
        next_logits(model, [text], cache)
        with Calls(), Operators():
            next_logits(model, [text + [11]], cache)
    return names, len(asked)


def test_operators_are_those_that_python_calls():
    """And in C there is as much of each as torch has, in one call."""
    from book.compiled import WORDS, c_calls

    names, count = names_called("stories")
    record, tree = drawn("native-step")
    kinds = [kind for kinds in record.torch for kind in kinds]
    assert len(kinds) == count
    products = sum(names.count(name) for name in ("matmul", "linear"))
    assert kinds.count("first") == products == 4 * 16 + 1 and record.calls == 1
    assert kinds.count("second") == names.count("scaled_dot_product_attention") == 16
    computing = ("layer_norm", "gelu", "add", "embedding", "arange", "isfinite", "all")
    assert kinds.count("good") == sum(names.count(name) for name in computing)
    copies = names.count("cat") + names.count("__setitem__")
    assert copies <= kinds.count("other") <= copies + names.count("contiguous")
    _, *layers, _ = record.torch
    assert len(layers) == 16 and all(own == layers[0] for own in layers[:-1])
    in_c = [kind for kinds in record.c for kind in kinds]
    first, layer, last = c_calls("stories")
    own = [call.name for call in [*first, *16 * layer, *last]]
    pairs = {"normalize": "layer_norm", "gelu": "gelu", "products": "matmul"}
    pairs |= {"attention": "scaled_dot_product_attention", "swiglu": "silu"}
    for ours, theirs in pairs.items():
        assert own.count(ours) == names.count(theirs)
    assert in_c.count("first") == products and in_c.count("second") == 16
    assert len(in_c) == len(own) and in_c.count("empty") == 0
    python, c = named(tree, "svg")
    for kind in WORDS:
        assert len(of_class(python, "rect", kind)) == kinds.count(kind)
        assert len(of_class(c, "rect", kind)) == in_c.count(kind)
    (frame,) = of_class(tree, "div", "call")
    assert named(frame, "svg") == [c]
    assert "An operator is a function inside torch." in words_of(tree)


def test_parts_of_a_layer():
    """Sizes are those of the model's own layers; C computes as much of each kind as torch."""
    from book.recordings import load

    record, tree = drawn("native-llama")
    names, _ = names_called("stories-llama")
    called = [call for part in record.parts for call in part.c]
    own = [call.name for call in called]
    assert 8 * own.count("normalize") + 1 == names.count("rms_norm")
    assert 8 * own.count("swiglu") == names.count("silu") == 8 and "gelu" not in own
    assert (record.layers, record.calls) == (8, 1)
    block = load("stories-llama").layers[1]
    linears = [layer for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    sizes = [call.words.split(" → ") for call in called if call.name == "products"]
    assert [int(size) for _, after in sizes for size in after.split(" + ")] == [
        layer.out_features for layer in linears
    ]
    assert {int(size) for size, _ in sizes} == {layer.in_features for layer in linears}
    assert "6 heads share the keys of 2, turned by position" in [call.words for call in called]
    assert [part.operators.count("first") for part in record.parts] == [0, 3, 1, 0, 2, 1]
    rows = list(tree.find(".//tbody").iter("tr"))
    for row, part in zip(rows, record.parts, strict=True):
        left, right = row.iter("td")
        assert words_of(left) == f"{part.name}: {len(part.operators)}"
        kinds = [rect.get("class") for rect in named(left, "rect")]
        assert kinds == part.operators
        in_c = [kind for call in part.c for kind in call.kinds]
        assert [rect.get("class") for rect in named(right, "rect")] == in_c
        assert in_c.count("first") == part.operators.count("first")
        assert in_c.count("second") == part.operators.count("second")
        assert words_of(right) == part.does and right.get("class") == "call"
        looks = any(call.name == "attention" for call in part.c)
        assert (part.does == "looks back at earlier tokens") == looks
        evens = any(call.name == "normalize" for call in part.c)
        assert (part.does == "evens out the numbers") == evens
    total = sum(len(part.operators) for part in record.parts)
    assert f"torch: {total} operators" in words_of(tree)
    in_c = sum(len(call.kinds) for call in called)
    assert f"C: {in_c} computations, inside one call" in words_of(tree)
    idle = len([kind for part in record.parts for kind in part.operators if kind == "empty"])
    assert f"{idle} of these compute no number" in words_of(tree)
    words_above = f"torch runs {total} operators, a square each. In C {in_c} computations"
    assert words_above in caption_of("native-llama")


# Draws


def logits_after(text: str) -> tuple[torch.Tensor, int]:
    """And the position of the next token."""
    from book.recordings import encoding, load

    ids = encoding().encode(text)
    with torch.inference_mode():
        return load()(torch.tensor([ids]))[0, -1], len(ids)


def test_who_runs_and_who_wins():
    from book.racing import SEED, P
    from book.recordings import text_of
    from sampling import SamplingParams, draw_among_all, keyed_noise

    record, tree = drawn("fast-draws")
    logits, position = logits_after("The cat")
    probs = (logits / 0.8).softmax(dim=-1)
    ordered = probs.sort(descending=True)
    count = int((ordered.values.cumsum(0) < P).sum()) + 1
    assert sorted(ordered.indices[:count].tolist()) == record.nucleus
    assert set(ordered.indices[:256].tolist()) == set(record.few)
    assert record.held == pytest.approx(ordered.values[:256].sum().item(), rel=1e-4)
    assert record.certain and record.numbers == 256 and record.size == len(logits)
    params = SamplingParams(temperature=0.8, top_p=P)
    draws = [(SEED, position)]
    winner = draw_among_all(logits[None], params, None, draws).item()
    assert record.runners[record.winner].text == text_of(winner)
    speeds = probs / keyed_noise(logits[None], draws)[0]
    names = {text_of(id): id for id in record.few}
    for runner in record.runners:
        assert runner.speed == pytest.approx(speeds[names[runner.text]].item(), rel=1e-4)
        assert runner.inside == (names[runner.text] in record.nucleus)
    assert caption_of("fast-draws").startswith(f"With top-p {P}, {count} of 4,096 tokens")
    assert len(of_class(tree, "rect", "second")) == len(record.nucleus)
    assert len(of_class(tree, "rect", "first")) == 256 - len(record.nucleus)
    places = [(int(part.get("x")), int(part.get("y"))) for part in of_class(tree, "rect", "second")]
    assert [y // 6 * 64 + x // 6 for x, y in places] == record.nucleus
    (table,) = tree.iter("table")
    assert tokens_of(table) == [runner.text for runner in record.runners]
    assert tokens_of(table, "new") == [text_of(winner)]
    shown = [row[3] for row in columns_of(table)[1:]]
    assert "hold all but 0.64\xa0%" in words_of(tree) and record.held == pytest.approx(
        0.9936, abs=5e-5
    )
    inside = [runner for runner in record.runners if runner.inside]
    assert [float(text) for text in shown if text != "outside"] == pytest.approx(
        [runner.speed for runner in inside], rel=0.006
    )


def test_few_tokens_that_are_not_enough(monkeypatch):
    """Where the few hold too little, all run, and the picture says so."""
    import sampling
    from book import racing

    monkeypatch.setattr(sampling, "FEW", 4)
    monkeypatch.setattr(racing, "FEW", 4)
    record = racing.record_few("The cat")
    assert not record.certain and record.numbers == 4 + 4096 and len(record.few) == 4
    caption = racing.draw_few(record).caption
    assert "too much to be certain" in caption and "4,100 random numbers" in caption


def test_which_tokens_need_a_logarithm():
    """As draw.c asks: the most likely one first, then block by block."""
    from book.racing import SEED
    from book.recordings import text_of
    from sampling import SamplingParams, keyed_noise, sample

    record, tree = drawn("native-draws")
    logits, position = logits_after("The cat")
    draws = [(SEED, position)]
    noise = keyed_noise(logits[None].double(), draws)[0].tolist()
    weights = ((logits - logits.max()) / 0.8).exp().tolist()
    speeds = [weight / own for weight, own in zip(weights, noise)]
    rest = [1 - 2.718281828459045**-own for own in noise]
    first = weights.index(1)
    best = speeds[first]
    asked = {first: 0}
    blocks = []  # the best speed before each
    for start in range(0, 4096, 256):
        before = best
        blocks.append(before)
        for id in range(start, start + 256):
            if weights[id] > rest[id] * before:
                asked.setdefault(id, before)
                best = max(best, speeds[id])
    winner = sample(logits[None], SamplingParams(temperature=0.8), None, draws).item()
    assert winner == max(range(4096), key=speeds.__getitem__)
    assert record.asked == len(asked) < 10 and record.best == pytest.approx(best, rel=1e-5)
    assert f"{len(asked)} of 4,096 tokens needed one" in caption_of("native-draws")
    assert "weight" not in words_of(tree)  # these are the model's own numbers
    shown = [entry for entry in record.entries if entry.asked]
    ids = [first, *sorted(set(asked) - {first})]
    assert [entry.text for entry in shown] == [text_of(id) for id in ids]
    assert [entry.text for entry in shown if entry.winner] == [text_of(winner)]
    assert [entry.before for entry in shown] == pytest.approx([asked[id] for id in ids], rel=1e-5)
    for entry in record.entries[1:]:
        id = min(range(4096), key=lambda id: abs(weights[id] / rest[id] - entry.bound))
        assert entry.before == pytest.approx(blocks[id // 256], rel=1e-5)
    for entry in record.entries:
        assert entry.speed <= entry.bound and (entry.asked or entry.bound <= entry.before)
    bounds = sorted((w / r for w, r in zip(weights, rest)), reverse=True)
    assert record.others == pytest.approx(bounds[len(record.entries)], rel=1e-5)
    assert tokens_of(tree) == [entry.text for entry in record.entries]
    scale = 100 / (1.25 * record.best)
    assert widths(tree) == pytest.approx([e.bound * scale for e in record.entries], abs=0.01)
    ticks = [float(tick.get("style")[5:-1]) for tick in of_class(tree, "b", "tick")]
    assert ticks == pytest.approx([e.before * scale for e in record.entries[1:]], abs=0.01)


# Weights and pages in memory


def test_weights_lie_where_gpt_c_reads_them():
    """Output o and input i are number i * width + o % width of panel o // width."""
    from book.recordings import load

    record, tree = drawn("packed-weights")
    weight = load().h[0].mlp.c_fc.weight[:6, :4]
    assert [cell.value for cell in record.before] == weight.flatten().tolist()
    assert [(cell.output, cell.input) for cell in record.before] == [
        (o, i) for o in range(6) for i in range(4)
    ]
    assert len(record.after) == 2 * 4 * 4
    found = {}
    for at, cell in enumerate(record.after):
        panel, place = divmod(at, 16)
        own = panel * 4 + place % 4, place // 4
        if own[0] < 6:
            assert (cell.output, cell.input) == own and cell.value == weight[own].item()
            found[own] = found.get(own, 0) + 1
        else:
            assert cell == (0, None, None)
    assert len(found) == 24 and set(found.values()) == {1}
    x = first_input("Once upon a time")[:4]
    assert record.x == pytest.approx(x.tolist(), rel=1e-4, abs=1e-5)
    sums = F.linear(x, weight).tolist()
    before, after = of_class(tree, "div", "panel")
    rows = columns_of(before)[1:]
    assert [number(row[-1]) for row in rows] == pytest.approx(sums, abs=6e-4)
    lanes = [number(cell) for row in columns_of(after) if row[0] == "sums" for cell in row[1:5]]
    assert lanes == pytest.approx([*sums, 0, 0], abs=6e-4)
    for cell, shown in zip(record.before, [text for row in rows for text in row[1:5]]):
        assert number(shown) == pytest.approx(cell.value, abs=6e-4)
    for part, cells in ((before, record.before), (after, record.after)):
        kinds = [
            cell.get("class")
            for row in part.iter("tr")
            if "sum" not in row.get("class", "")
            for cell in row.iter("td")
            if cell.get("class") not in ("value", "x")
        ]
        expected = ["pad" if cell.output is None else f"tint{cell.output}" for cell in cells]
        assert kinds == expected


def test_groups_of_int8_weights_and_a_lane():
    from book.recordings import load
    from int8 import quantize

    record, tree = drawn("packed-int8")
    values, _ = quantize(load().h[0].mlp.c_fc.weight[:4, :8].detach())
    for at, cell in enumerate(record.memory):
        group, place = divmod(at, 16)
        assert (cell.output, cell.input) == (place // 4, 4 * group + place % 4)
        assert cell.value == values[cell.output, cell.input].item()
    x = quantize(first_input("Once upon a time")[:8])[0].tolist()
    assert record.x == x and record.weights == values[0, :4].tolist()
    bytes_, lane = of_class(tree, "div", "panel")
    groups = of_class(bytes_, "span", "lane")
    shown = [[number(words_of(byte)) for byte in group] for group in groups]
    assert shown == [values[o, i : i + 4].tolist() for i in (0, 4) for o in range(4)]
    (framed,) = of_class(bytes_, "span", "worked")  # the lane that is worked out
    assert [number(words_of(byte)) for byte in framed] == record.weights
    (frame,) = of_class(lane, "div", "worked")
    own = [words_of(cell) for cell in of_class(frame, "td", "tint0")]
    assert [number(text) for text in own] == record.weights
    rows = columns_of(lane)
    exact = sum(a * b for a, b in zip(x[:4], record.weights))
    assert [number(cell) for cell in rows[1][1:5]] == [value + 128 for value in x[:4]]
    assert number(rows[3][5]) + number(rows[4][2]) == number(rows[5][2]) == exact
    assert number(rows[4][2]) == -128 * sum(record.weights)


def test_bits_of_a_text_cut_into_passes():
    from book.recordings import native
    from cache import KVCache, Span

    record, tree = drawn("native-batches")
    logits, count = logits_after("Once upon a time")
    text = [token for part in record[0].passes for token in part]
    model = native()
    from book.recordings import encoding

    span = Span([0], 0, encoding().encode("".join(text)))
    alone = model.runner.compute(KVCache(model, 1).storage, [span], [1])[0]
    assert [len(way.passes) for way in record] == [1, 2, count, 1]
    for way in record:
        assert [token for part in way.passes for token in part] == text
        assert way.native == alone.max().item() and way.apart[1] == 0
        assert way.size == len(logits) == 4096
        assert way.torch == pytest.approx(logits.max().item(), abs=1e-4)
    assert record[0].apart == (0, 0) and "4,096 logits" in caption_of("native-batches")
    assert f"The last line is a pass of {4 * (1 + record[-1].beside)} tokens" in words_of(tree)
    for way, line in zip(record, of_class(tree, "ul", "ways")[0]):
        boxes = of_class(line, "span", "pass")
        assert [tokens_of(each) for each in boxes] == way.passes
        results = [words_of(each) for each in of_class(line, "span", "result")]
        assert [float(words.split()[1]) for words in results] == pytest.approx(
            [way.torch, way.native], abs=1e-6
        )
        changed = [f"{count:,} logits" if count else "none" for count in way.apart]
        assert all(words in result for words, result in zip(changed, results))


def test_pages_that_a_query_reads():
    from engine.pages import page_count

    record, tree = drawn("native-pages")
    number_of = {page: record.pages.index(page) for page in record.pages[: len(record.words)]}
    assert len({record.owners[page] for page in record.pages}) == 1
    text = "".join(word for page in record.words for word in page)
    assert text.startswith("Lily saw") and [len(page) for page in record.words[:-1]] == [4, 4]
    positions = sum(map(len, record.words))
    assert positions in record.positions and record.bytes == 16 * 2 * 256 * 4  # as the lesson says
    for index, length in enumerate(record.positions):
        assert record.owners.count(index) >= page_count(length, record.size)
    assert record.size == max(map(len, record.words)) == 4
    order = ", ".join(map(str, number_of))
    assert f"lies on pages {order}, of 4 tokens each" in words_of(tree)
    assert f"copy pages {order} side by side" in words_of(tree)
    whole = sum(4 * page_count(count, 4) for count in record.positions) * record.bytes
    assert ("and padding" in words_of(tree)) is (record.copied != whole)
    # torch copies whole pages, and fills a group up to its longest text.
    groups = {}
    for length in record.positions:
        used = page_count(length, 4)
        groups.setdefault(used.bit_length(), []).append(used)
    whole = sum(max(group) * len(group) for group in groups.values())
    assert record.copied == whole * 4 * record.bytes
    copied, direct = named(tree, "svg")
    for part in (copied, direct):
        own = of_class(part, "rect", "second")
        assert sorted(int(float(each.get("x"))) // 33 for each in own) == sorted(number_of)
        assert len(of_class(part, "polyline", "second")) == len(number_of)
        assert len(of_class(part, "rect", "empty")) == record.owners.count(None)
    assert len(of_class(copied, "rect", "other")) == len(number_of)
    ends = {
        int(float(line.get("points").split(",")[0])) // 33: float(
            line.get("points").split()[1].split(",")[0]
        )
        for line in of_class(copied, "polyline", "second")
    }
    assert sorted(ends, key=ends.get) == list(number_of)
    reads = sum(record.positions) * record.bytes / 1e6
    moved = f"{reads:.2f} MB move instead of {3 * record.copied / 1e6:.2f}."
    assert caption_of("native-pages").endswith(moved)
    share = 100 * sum(record.positions) * record.bytes / (3 * record.copied)
    assert widths(tree) == pytest.approx([100, share], abs=0.01)


@pytest.mark.parametrize(
    ("slug", "same", "other"),
    [
        ("int8-weights", "weights", "exact"),
        ("native-backend", "choices", "texts"),
        ("native-linear", "bytes", "orders"),
        ("native-step", "torch", None),
        ("native-llama", "parts", None),
        ("packed-weights", "before", "x"),
        ("packed-int8", "memory", "x"),
    ],
)
def test_what_a_prompt_of_ones_own_changes(slug, same, other):
    """Where that is not all of the picture, the line above the command says it."""
    from book.pictures import PICTURES, figure

    record, _ = drawn(slug)
    mine = PICTURES[slug].record("A dog")
    assert getattr(mine, same) == getattr(record, same)
    assert mine == record if other is None else getattr(mine, other) != getattr(record, other)
    (made,) = of_class(tree_of(figure(f"00-{slug}")), "p", "made")
    assert words_of(made) == f"Drawn from a run of this code. {PICTURES[slug].own}:"
    assert PICTURES[slug].own.startswith("A ")


def test_a_control_token_is_a_prompt_too():
    from book import compiled, packing, racing

    for part in (compiled, racing, packing):
        for picture in part.PICTURES.values():
            drawing = picture.draw(picture.record("<|endoftext|>"))
            tree_of(f"{drawing.caption}{drawing.body}")


@pytest.mark.parametrize("prompt", ["", "a " * 300])
def test_prompts_of_no_token_and_of_many(prompt):
    from book import compiled, packing, racing
    from errors import UserError

    for part in (compiled, racing, packing):
        for picture in part.PICTURES.values():
            with pytest.raises(UserError, match="this picture shows 1 to "):
                picture.record(prompt)
