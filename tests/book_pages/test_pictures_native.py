"""The pictures of compiled code and of benchmarks show what the runs gave, and the rows."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run
from drawings import caption_of, drawn, number, of_class, tokens_of, tree_of, words_of


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


@pytest.mark.parametrize(
    ("slug", "same", "other"),
    [
        ("int8-weights", "weights", "exact"),
        ("native-backend", "choices", "texts"),
        ("native-linear", "bytes", "orders"),
        ("native-step", "torch", None),
        ("native-llama", "parts", None),
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
    from book import compiled, packing

    for part in (compiled, packing):
        for picture in part.PICTURES.values():
            drawing = picture.draw(picture.record("<|endoftext|>"))
            tree_of(f"{drawing.caption}{drawing.body}")


@pytest.mark.parametrize("prompt", ["", "a " * 300])
def test_prompts_of_no_token_and_of_many(prompt):
    from book import compiled, packing
    from errors import UserError

    for part in (compiled, packing):
        for picture in part.PICTURES.values():
            with pytest.raises(UserError, match="this picture shows 1 to "):
                picture.record(prompt)
