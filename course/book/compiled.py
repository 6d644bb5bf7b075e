"""Pictures of lessons 25 to 28 and 36: what C computes, how often it is called, and when."""

import argparse
import ast
import contextlib
import io
import re
import sys
from collections import Counter
from types import CodeType
from typing import NamedTuple
from unittest import mock

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import command_line
import lessons as course
from book import recordings
from book.draw import (
    Drawing,
    Picture,
    box,
    escape,
    key,
    panel,
    panels,
    signed,
    svg,
    token,
)
from book.numbers import first_product
from cache import KVCache
from errors import UserError
from infer import next_logits
from int8 import Int8Linear, quantize
from loading.load import load_model
from native import BuildError, build
from native.linear import NativeLinear, native_layers


def differing(texts: list[str], first: str) -> list[str]:
    """Each text as HTML, from where it differs from the first one on in a colour of its own."""
    shown = []
    for text in texts:
        same = 0
        while same < min(len(text), len(first)) and text[same] == first[same]:
            same += 1
        tail = f'<mark class="differs">{escape(text[same:])}</mark>' if text[same:] else ""
        shown.append(f"{escape(text[:same])}{tail}")
    return shown


class Orders(NamedTuple):
    """The products of one output, added in different orders."""

    x: list[int]  # the first four values
    w: list[int]
    count: int  # of all products
    orders: list[tuple[str, float, int]]  # name, sum in float32, sum of whole numbers
    scale: float  # of both
    torch: float  # the output of int8.py
    native: float  # of gpt.c


@torch.inference_mode()
def record_orders(prompt: str) -> Orders:
    """The first output of the first MLP at the last position, as in lesson 24's picture."""
    weight, x = first_product(prompt)
    w = weight[:1].clone()
    x_values, x_scale = quantize(x)
    w_values, w_scale = quantize(w)
    exact = (x * w[0]).numpy()
    whole = (x_values.int() * w_values[0].int()).numpy()
    small = Int8Linear(torch.nn.Linear(w.shape[1], 1, bias=False))
    small.weight = w_values
    small.scale = w_scale
    eager = small(x[None]).item()
    return Orders(
        x_values[:4].tolist(),
        w_values[0, :4].tolist(),
        len(exact),
        [(name, add(exact).item(), add(whole).item()) for name, add in ORDERS.items()],
        (x_scale * w_scale[0]).item(),
        eager,
        NativeLinear(small, recordings.native().runner.library)(x[None]).item(),
    )


def in_order(numbers: numpy.ndarray) -> numpy.number:
    """The sum, rounded after each number."""
    return numpy.cumsum(numbers, dtype=numbers.dtype)[-1]


def side_by_side(numbers: numpy.ndarray) -> numpy.number:
    """16 sums, each of every 16th number, and then the sum of these."""
    return in_order(numpy.cumsum(numbers.reshape(-1, 16), axis=0, dtype=numbers.dtype)[-1])


ORDERS = {
    "first to last": in_order,
    "last to first": lambda numbers: in_order(numbers[::-1]),
    "16 side by side": side_by_side,
}


def draw_orders(record: Orders) -> Drawing:
    products = [a * b for a, b in zip(record.x, record.w)]
    lines = (("values of x", record.x), ("weights", record.w), ("products", products))
    rows = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f"<td>{signed(number, 0)}</td>" for number in numbers)
        + "</tr>"
        for name, numbers in lines
    )
    four = signed(sum(products), 0)
    rows += f'<tr class="sum"><th scope="row">their sum</th><td colspan="4">{four}</td></tr>'
    first = f"{record.orders[0][1]:.8f}"
    floats = differing([f"{number:.8f}" for _, number, _ in record.orders], first)
    table = "".join(
        f'<tr><th scope="row">{name}</th><td>{shown}</td><td><b>{whole:,}</b></td></tr>'
        for (name, _, whole), shown in zip(record.orders, floats)
    ).replace("-", "\u2212")
    head = "<th></th><th>float32</th><th>int32</th>"
    total = f"{record.orders[0][2]:,}".replace("-", "\u2212")
    different = len({number for _, number, _ in record.orders})
    body = panels(
        panel(
            f"Four of {record.count} products",
            f'<table class="figures">{rows}</table>',
            "A processor has instructions that make many of these products and add them to many "
            "sums at once.",
        ),
        panel(
            f"All {record.count}, added in three orders",
            f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>',
            f"{total} &times; {record.scale:.6g}, the product of both scales, = "
            f"{signed(record.torch, 6)} in torch, {signed(record.native, 6)} in C.",
        ),
    )
    sums = "one sum" if different == 1 else f"{different} different sums"
    caption = (
        f"float32 rounds after each addition: three orders give {sums} here. Whole numbers give "
        f"{total} in any order, so a program in C may add as many side by side as the processor "
        "can, and the output has the same bits."
    )
    text = (
        f"Four products of whole numbers, {products}, and the sum of {record.count} in three "
        f"orders: float32 {[number for _, number, _ in record.orders]}, whole numbers "
        f"{[number for _, _, number in record.orders]}."
    )
    return Drawing(body, caption, text)


class Choice(NamedTuple):
    """What computes a model in one situation, by the rule of the lesson."""

    place: str  # what the machine has, and the dtype
    backends: dict[str, tuple[str, str]]  # --backend -> C, torch or an error, and what is said


class Choices(NamedTuple):
    choices: list[Choice]
    texts: dict[str, list[str]]  # what torch and C write after the prompt
    prompt: str


PLACES = {  # name: device, dtype, whether there is a compiler
    "CPU, int8": ("cpu", "int8", True),
    "CPU, float32": ("cpu", "float32", True),
    "CPU, bfloat16": ("cpu", "bfloat16", True),
    "GPU, int8": ("cuda", "int8", True),
    "CPU, int8, no compiler": ("cpu", "int8", False),
}


def record_choices(prompt: str, count: int = 12) -> Choices:
    ids = recordings.encode(prompt, 60)
    rule = code_of_the_lesson()
    choices = []
    for place, (device, dtype, compiler) in PLACES.items():
        backends = {}
        for backend in ("auto", "native", "torch"):
            args = argparse.Namespace(backend=backend, dtype=dtype)
            backends[backend] = ask(rule, args, device, compiler)
        choices.append(Choice(place, backends))
    texts = {}
    params = recordings.SamplingParams(count, ignore_eos=True)
    eager, native = (load_model(command_line.STORIES, torch.int8) for _ in range(2))
    native_layers(native, recordings.native().runner.library)  # products alone, as in the lesson
    for name, model in (("torch", eager), ("C", native)):
        steps = recordings.generate(model, [ids], params)
        texts[name] = [recordings.text_of(token) for (token,) in steps]
    return Choices(choices, texts, prompt)


def code_of_the_lesson() -> CodeType:
    """Its `load_models` and `go_native`: later lessons change the rule."""
    try:
        _, all_lessons = course.read_main()
        commit = course.find(all_lessons, "native-backend").commit
        source = course.git("show", f"{commit}:command_line.py")
    except course.LessonError as error:
        raise UserError(str(error)) from None
    tree = ast.parse(source)
    wanted = ("load_models", "go_native")
    tree.body = [part for part in tree.body if getattr(part, "name", "") in wanted]
    return compile(tree, "command_line.py", "exec")


def ask(rule: CodeType, args: argparse.Namespace, device: str, compiler: bool) -> tuple[str, str]:
    """What that code does there, with models that do nothing."""
    used = []
    model = argparse.Namespace()

    def use_native(model):
        if not compiler:
            nothing = {"return_value": None}
            with mock.patch.object(build.shutil, "which", **nothing):
                with mock.patch.object(build.importlib.util, "find_spec", **nothing):
                    build.default_compiler()
        used.append("C")

    names = {
        "use_native": use_native,
        "kernel": lambda: "",
        "load_model": lambda *_: model,
        "pick_dtype": lambda name, _: command_line.DTYPES[name],
        **{"sys": sys, "GPT": object, "BuildError": BuildError, "UserError": UserError},
    }
    exec(rule, names)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            names["load_models"](["a model"], args, device)
        except UserError as error:
            return "error", str(error)
    return "".join(used) or "torch", errors.getvalue().strip()


def draw_choices(record: Choices) -> Drawing:
    kinds = {"C": "tok new", "torch": "tok old", "error": "tok out"}
    names = list(record.choices[0].backends)
    said = []  # each message once, with a number
    rows = ""
    for choice in record.choices:
        cells = ""
        for answer, words in choice.backends.values():
            number = ""
            if words:
                said += [] if words in said else [words]
                number = f" <sup>{said.index(words) + 1}</sup>"
            cells += f'<td><code class="{kinds[answer]}">{answer}</code>{number}</td>'
        rows += f'<tr><th scope="row">{choice.place}</th>{cells}</tr>'
    head = "<th>device, weights</th>" + "".join(f"<th>{name}</th>" for name in names)
    table = (
        f'<table class="choices"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        + '<ol class="said">'
        + "".join(f"<li>{escape(words)}</li>" for words in said)
        + "</ol>"
    )
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td class="flow">'
        + " ".join(token(text, "new" if name == "C" else "old") for text in texts)
        + "</td></tr>"
        for name, texts in record.texts.items()
    )
    same = record.texts["torch"] == record.texts["C"]
    body = panels(
        panel(
            "What computes, for each --backend; native: C, default: auto",
            f'<div class="scroll">{table}</div>',
        ),
        panel(
            f"After {token(record.prompt)}, greedily, with int8 weights",
            f'<table class="rows">{lines}</table>',
            "The same tokens." if same else "Not the same tokens: a tie that rounding decided.",
        ),
    )
    caption = (
        "By default C computes what it can, so far int8 on a CPU, and torch the rest. Who asks for "
        "native by name is told what stands in the way."
    )
    text = "What computes with auto, native and torch: " + "; ".join(
        f"{choice.place}: " + ", ".join(answer for answer, _ in choice.backends.values())
        for choice in record.choices
    )
    return Drawing(body, caption, text + ".")


# operators of torch -> what they do: the rest only says where numbers are
KINDS = {
    "first": ("matmul", "mm", "addmm", "linear", "bmm", "addmv"),
    "second": ("scaled_dot_product_attention",),
    "good": (
        *("layer_norm", "rms_norm", "gelu", "silu", "add", "mul", "addcmul", "roll"),
        *("embedding", "index", "isfinite", "all", "max", "arange"),
    ),
    "other": ("cat", "copy_", "contiguous", "clone"),
}
WORDS = {
    "first": "products with weights",
    "second": "attention",
    "good": "norms, sums and the like",
    "other": "copies",
    "empty": "no number computed: other views of the same memory",
}


@torch.inference_mode()
def operators(name: str, text: list[int], modules: list[torch.nn.Module]) -> list[list[str]]:
    """The CSS class of each operator that torch is asked for in one decode step.

    Before the first of these modules is called, from there to the next, and so on.
    """
    seen = [[]]

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked = function.overloadpacket.__name__
            kinds = (kind for kind, names in KINDS.items() if asked in names)
            seen[-1].append(next(kinds, "empty"))
            return function(*args, **(kwargs or {}))

    hooks = [module.register_forward_pre_hook(lambda *_: seen.append([])) for module in modules]
    step_in(recordings.load(name), text, Noted())
    for hook in hooks:
        hook.remove()
    return seen[-1 - len(modules) :]  # those before it are of the pass that nobody noted


@torch.inference_mode()
def calls(name: str, text: list[int]) -> int:
    """How often one decode step calls gpt_pass from Python."""
    native = recordings.native(name).runner
    counted = mock.Mock(wraps=native.library)
    step_in(recordings.native(name), text, mock.patch.object(native, "library", counted))
    return counted.gpt_pass.call_count


def step_in(model, text: list[int], context: contextlib.AbstractContextManager) -> None:
    """Compute a text, and then one token more in this context."""
    cache = KVCache(model, 1, len(text) + 1)
    logits = next_logits(model, [text], cache)
    longer = text + [logits[0, -1].argmax().item()]
    with context:
        next_logits(model, [longer], cache)


class Call(NamedTuple):
    """A function that gpt_pass calls."""

    name: str
    kinds: list[str]  # CSS class of what it computes
    words: str  # what its structs say


C_KINDS = {
    **dict.fromkeys(("embed", "normalize", "swiglu", "gelu"), "good"),
    "products": "first",
    "attention": "second",
}
CALLED = re.compile(rf"\b({'|'.join(C_KINDS)})\((?:&?(layer|m)->(\w+))?")


def c_calls(name: str) -> list[list[Call]]:
    """What the code of gpt_pass calls before its layers, for each of them, and after them."""
    native = recordings.native(name).runner
    model = native.model
    structs = {"m": model, "layer": model.layers[0]}
    unused = "gelu" if model.layers[0].mlp_in[1].out_features else "swiglu"
    body = build.SOURCE.read_text("utf-8").partition("void gpt_pass")[2].partition("#include")[0]
    sections = []
    for code in re.split(r"for .* m->n_layer; .*|\n    }\n", body):
        called = []
        for function, owner, field in CALLED.findall(code):
            count = 1
            words = ""
            if function == "normalize":
                words = "layer norm" if getattr(structs[owner], field).bias else "RMSNorm"
            if function == "products":
                read = getattr(structs[owner], field)
                used = [each for each in ([read] if "_in" not in field else read) if each.weight]
                words = f"{used[0].in_features} \u2192 "
                words += " + ".join(str(each.out_features) for each in used)
                count = len(used)
            if function == "attention":
                words = f"{model.n_head} heads"
                if model.n_kv_head < model.n_head:
                    words += f" share the keys of {model.n_kv_head}"
                words += ", turned by position" * (native.rotations is not None)
            if function != unused:
                called.append(Call(function, [C_KINDS[function]] * count, words))
        sections.append(called)
    return sections


class Step(NamedTuple):
    """One decode step, in torch and in C: the CSS classes of what is computed in each layer."""

    torch: list[list[str]]  # before, in and after the layers
    c: list[list[str]]
    calls: int  # of a pass in C


def record_step(prompt: str) -> Step:
    text = recordings.encode(prompt, 200)
    model = recordings.load()
    seen = operators("stories", text, [*model.h, model.ln_f])
    kinds = [[kind for call in part for kind in call.kinds] for part in c_calls("stories")]
    first, layer, last = kinds
    inside = [first, *[layer] * len(model.h), last]
    return Step(seen, inside, calls("stories", text))


def draw_step(record: Step) -> Drawing:
    python, inside = (Counter(kind for kinds in each for kind in kinds) for each in record[:2])
    total = python.total()
    words = {kind: f"{python[kind]} {words}" for kind, words in WORDS.items() if python[kind]}
    called = "one call" if record.calls == 1 else f"{record.calls} calls"
    body = (
        f'<p class="title">torch: {total} operators, one after the other; a row is a layer</p>'
        f'{lines_of(record.torch)}{key(**words)}<p class="title one">C: {called} from '
        f"Python, gpt_pass (the frame), and what it computes</p>"
        f'<div class="call">{lines_of(record.c)}</div><p class="note">An operator is a function '
        "inside torch. The first and "
        f"the last row are what comes before and after the {len(record.c) - 2} layers.</p>"
    )
    caption = (
        f"For one new token torch runs {total} operators, and {python['empty'] + python['other']} "
        f"of these only copy, or compute nothing. In C all of the step is {called}, with the same "
        f"{inside['first']} products and {inside['second']} attentions."
    )
    text = (
        f"{total} squares for torch's operators, {', '.join(words.values())}; in a frame, {called} "
        f"of C, {inside.total()} squares: {inside['first']} products, {inside['second']} "
        f"attentions and {inside['good']} others."
    )
    return Drawing(body, caption, text)


def lines_of(lines: list[list[str]], side: int = 11) -> str:
    """A row of squares for each."""
    body = "".join(
        box(x * side, y * side, side - 2, side - 2, kind)
        for y, kinds in enumerate(lines)
        for x, kind in enumerate(kinds)
    )
    return svg(max(map(len, lines)) * side, len(lines) * side, body, "tiles")


class Part(NamedTuple):
    """A part of one layer of a Llama: a norm, or a product and what follows it."""

    name: str
    does: str  # in plain words
    operators: list[str]  # CSS class of each of torch's
    c: list[Call]


class Layer(NamedTuple):
    parts: list[Part]
    layers: int  # of the model
    calls: int  # of a pass in C


NAMES = {  # part: what it does, in plain words
    "norm": "evens out the numbers",
    "queries, keys, values": "looks back at earlier tokens",
    "attention out": "adds what it saw to the token\u2019s vector",
    "norm again": "evens out the numbers",
    "MLP in": "works on each token alone",
    "MLP out": "adds what came out to the token\u2019s vector",
}


def record_layer(prompt: str) -> Layer:
    text = recordings.encode(prompt, 200)
    model = recordings.load("stories-llama")
    block = model.layers[1]
    begins = [
        *(block.input_layernorm, block.self_attn.q_proj, block.self_attn.o_proj),
        *(block.post_attention_layernorm, block.mlp.gate_proj, block.mlp.down_proj),
        model.layers[2],
    ]
    _, *seen, _ = operators("stories-llama", text, begins)
    in_c = parts_of("stories-llama")
    parts = [Part(*name, *each) for name, *each in zip(NAMES.items(), seen, in_c, strict=True)]
    return Layer(parts, len(model.layers), calls("stories-llama", text))


def parts_of(name: str) -> list[list[Call]]:
    """What C calls for a layer: a norm and a product begin a part, other functions follow them."""
    parts = []
    for call in c_calls(name)[1]:
        if call.name in ("normalize", "products"):
            parts.append([])
        parts[-1].append(call)
    return parts


def draw_layer(record: Layer) -> Drawing:
    rows = ""
    for part in record.parts:
        squares = [part.operators[at : at + 12] for at in range(0, len(part.operators), 12)]
        own = [kind for call in part.c for kind in call.kinds]
        rows += (
            f"<tr><td><b>{part.name}: {len(part.operators)}</b>{lines_of(squares)}</td>"
            f'<td class="call">{lines_of([own])}{part.does}</td></tr>'
        )
    total = sum(len(part.operators) for part in record.parts)
    called = "one call" if record.calls == 1 else f"{record.calls} calls"
    in_c = sum(len(call.kinds) for part in record.parts for call in part.c)
    head = f"<th>torch: {total} operators</th><th>C: {in_c} computations, inside {called}</th>"
    table = f'<table class="stages"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    caption = (
        f"For one layer of a Llama torch runs {total} operators, a square each. In C {in_c} "
        f"computations are enough, and {called} does all {record.layers} layers."
    )
    idle = sum(part.operators.count("empty") for part in record.parts)
    note = (
        f'<p class="note">An operator is a function inside torch; {idle} of these compute no '
        "number.</p>"
    )
    text = "Parts of a layer, torch's calls and C's functions: " + "; ".join(
        f"{part.name} {len(part.operators)}, "
        + ", ".join(f"{call.name} {call.words}" for call in part.c)
        for part in record.parts
    )
    return Drawing(table + key(**WORDS) + note, caption, text + ".")


SAME = "A prompt of your own makes the same calls"
PICTURES = {  # slug of a lesson -> its picture
    "native-int8": Picture("One day", record_orders, draw_orders),
    "native-backend": Picture(
        "Once upon a time",
        record_choices,
        draw_choices,
        own="A prompt of your own gives other texts; the table stays",
    ),
    "native-step": Picture("Once upon a time", record_step, draw_step, own=SAME),
    "native-llama": Picture("Once upon a time", record_layer, draw_layer, own=SAME),
}
