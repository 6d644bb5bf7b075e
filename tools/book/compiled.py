"""Pictures of lessons 25 to 28 and 36: what C computes, how often it is called, and when."""

import argparse
import contextlib
import io
from collections import Counter
from typing import NamedTuple
from unittest import mock

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import command_line
from book import recordings
from book.draw import (
    Drawing,
    Picture,
    box,
    escape,
    key,
    panel,
    panels,
    rows_of,
    signed,
    svg,
    token,
)
from cache import KVCache
from errors import UserError
from infer import next_logits
from int8 import Int8Linear, quantize
from native import build
from native.linear import NativeLinear


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
    layer = recordings.load().h[0].mlp.c_fc
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
    recordings.next_logits(recordings.encode(prompt, 200))
    hook.remove()
    x = seen[0]
    w = layer.weight[:1].detach().clone()
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
        NativeLinear(small, recordings.native().native.library)(x[None]).item(),
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
            f"{total} &times; the scales {record.scale:.6g} = "
            f"{signed(record.torch, 6)} in torch, {signed(record.native, 6)} in C.",
        ),
    )
    sums = "one sum" if different == 1 else f"{different} different sums"
    caption = (
        f"float32 rounds after each addition: three orders give {sums} here. Whole numbers give "
        f"{total} in any order, so C may add as many side by side as the processor can, "
        "and the output has the same bits."
    )
    text = (
        f"Four products of whole numbers, {products}, and the sum of {record.count} in three "
        f"orders: float32 {[number for _, number, _ in record.orders]}, whole numbers "
        f"{[number for _, _, number in record.orders]}."
    )
    return Drawing(body, caption, text)


class Choice(NamedTuple):
    """What computes a model in one situation."""

    place: str  # what the machine has, and the dtype
    backends: dict[str, tuple[str, str]]  # --backend -> C, torch or an error, and what is said


class Choices(NamedTuple):
    choices: list[Choice]
    texts: dict[str, list[str]]  # what torch and C write after the prompt
    prompt: str


PLACES = {  # name: device, dtype, whether there is a compiler
    "CPU, float32": ("cpu", "float32", True),
    "CPU, int8": ("cpu", "int8", True),
    "CPU, bfloat16": ("cpu", "bfloat16", True),
    "GPU, float32": ("cuda", "float32", True),
    "CPU, no compiler": ("cpu", "float32", False),
}


def record_choices(prompt: str, count: int = 12) -> Choices:
    ids = recordings.encode(prompt, 60)
    choices = []
    for place, (device, dtype, compiler) in PLACES.items():
        backends = {}
        for backend in ("auto", "native", "torch"):
            args = argparse.Namespace(backend=backend, dtype=dtype)
            backends[backend] = ask(args, device, compiler)
        choices.append(Choice(place, backends))
    texts = {}
    params = recordings.SamplingParams(count, ignore_eos=True)
    for name, model in (("torch", recordings.load()), ("C", recordings.native())):
        steps = recordings.generate(model, [ids], params)
        texts[name] = [recordings.text_of(token) for (token,) in steps]
    return Choices(choices, texts, prompt)


def ask(args: argparse.Namespace, device: str, compiler: bool) -> tuple[str, str]:
    """What the repository's own `load_models` does there, with models that do nothing."""
    model = argparse.Namespace(native=None)

    def use_native(model):
        if not compiler:
            nothing = {"return_value": None}
            with mock.patch.object(build.shutil, "which", **nothing):
                with mock.patch.object(build.importlib.util, "find_spec", **nothing):
                    build.default_compiler()
        model.native = "C"

    stand_ins = {
        "use_native": use_native,
        "kernel": lambda: "",
        "load_model": lambda *_: model,
        "pick_dtype": lambda name, _: command_line.DTYPES[name],
    }
    errors = io.StringIO()
    with contextlib.ExitStack() as held:
        for name, function in stand_ins.items():
            held.enter_context(mock.patch.object(command_line, name, function))
        held.enter_context(contextlib.redirect_stderr(errors))
        try:
            command_line.load_models(["a model"], args, device)
        except UserError as error:
            return "error", str(error)
    return model.native or "torch", errors.getvalue().strip()


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
    head = "<th></th>" + "".join(f"<th>{name}</th>" for name in names)
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
        panel("What computes, for each --backend", f'<div class="scroll">{table}</div>'),
        panel(
            f"After {token(record.prompt)}, greedily",
            f'<table class="rows">{lines}</table>',
            "The same tokens." if same else "Not the same tokens: a tie that rounding decided.",
        ),
    )
    automatic = [choice.backends["auto"] for choice in record.choices]
    in_c = sum(answer == "C" for answer, _ in automatic)
    loud = sum(bool(words) for _, words in automatic)
    caption = (
        f"auto, the default, never refuses: C in {in_c} of these {len(automatic)} situations, "
        f"torch in the others, with a line that says why in {loud}. Who names native is told "
        "what stands in the way. (Today: in this lesson C has int8 alone, float32 comes with 27 "
        "and 28.)"
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
    "good": "norms, sums, GELU",
    "other": "copies",
    "empty": "no number computed: slices, views, transposes",
}


class Operators(TorchDispatchMode):
    """Notes the operators that torch is asked for: CSS class of their kind, name and stage."""

    def __init__(self):
        super().__init__()
        self.stage = ""  # where the pass is
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen.append((kind_of(name), name, self.stage))
        return function(*args, **(kwargs or {}))


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if name in names), "empty")


@torch.inference_mode()
def operators(name: str, text: list[int], stages: dict | None = None) -> list[tuple]:
    """What torch is asked for in one decode step. stages: module of the model -> name of a part."""
    model = recordings.load(name)
    cache = KVCache(model, 1, len(text) + 1)
    logits = next_logits(model, [text], cache)
    step = text + [logits[0, -1].argmax().item()]
    noted = Operators()
    hooks = []

    def begin(stage):
        def hook(*_):
            noted.stage = stage

        return hook

    for module, stage in (stages or {}).items():
        hooks.append(module.register_forward_pre_hook(begin(stage)))
    with noted:
        next_logits(model, [step], cache)
    for hook in hooks:
        hook.remove()
    return noted.seen


@torch.inference_mode()
def calls(name: str, text: list[int]) -> list[str]:
    """The functions of gpt.c that one decode step calls from Python."""
    model = recordings.native(name)
    cache = KVCache(model, 1, len(text) + 1)
    logits = next_logits(model, [text], cache)
    step = text + [logits[0, -1].argmax().item()]
    found = []
    library = model.native.library

    class Counting:
        def __getattr__(self, called):
            found.append(called)
            return getattr(library, called)

    with mock.patch.object(model.native, "library", Counting()):
        next_logits(model, [step], cache)
    return [called for called in found if called == "gpt_pass"]


class Step(NamedTuple):
    """One decode step, in torch and in C."""

    stages: dict[str, list[str]]  # layer -> CSS class of each of torch's operators
    calls: int  # of a pass in C


def record_step(prompt: str) -> Step:
    text = recordings.encode(prompt, 200)
    model = recordings.load()
    stages = {block: f"layer {number}" for number, block in enumerate(model.h, 1)}
    found = {}
    for kind, _, stage in operators("stories", text, stages | {model.ln_f: "head"}):
        found.setdefault(stage or "token", []).append(kind)
    return Step(found, len(calls("stories", text)))


def draw_step(record: Step) -> Drawing:
    counts = Counter(kind for kinds in record.stages.values() for kind in kinds)
    total = counts.total()
    words = {kind: f"{counts[kind]} {words}" for kind, words in WORDS.items() if counts[kind]}
    called = "one call" if record.calls == 1 else f"{record.calls} calls"
    wide = max(map(len, record.stages.values()))
    body = (
        f'<p class="title">torch: {total} operators, one after the other, each called from Python'
        f"</p>{lines_of(record.stages, wide)}{key(**words)}"
        f'<p class="title one">C: {called} of gpt_pass, which does all of that</p>'
        f"{tiles(['bad'] * record.calls, wide)}"
    )
    layers = len(record.stages) - 2
    caption = (
        f"One new token in a model of {layers} layers, a row each: every square is an operator "
        f"that torch runs, {total} in all. {counts['first']} of them multiply with weights, "
        f"{counts['empty']} only say where numbers are. In C it is {called}."
    )
    text = f"{total} squares for torch's operators, {', '.join(words.values())}; {called} of C."
    return Drawing(body, caption, text)


def lines_of(stages: dict[str, list[str]], wide: int, side: int = 11) -> str:
    """A row of squares for each."""
    body = "".join(
        box(x * side, y * side, side - 2, side - 2, kind)
        for y, kinds in enumerate(stages.values())
        for x, kind in enumerate(kinds)
    )
    return svg(wide * side, len(stages) * side, body, "tiles")


def tiles(kinds: list[str], wide: int, side: int = 11) -> str:
    """Squares in reading order, so many in a row."""
    body = "".join(
        box(at % wide * side, at // wide * side, side - 2, side - 2, kind)
        for at, kind in enumerate(kinds)
    )
    return svg(wide * side, -(-len(kinds) // wide) * side, body, "tiles")


class Part(NamedTuple):
    """A part of one layer."""

    name: str
    operators: list[str]  # CSS class of each of torch's
    sizes: str  # what C is told


class Layers(NamedTuple):
    """A layer of each architecture."""

    parts: dict[str, list[Part]]  # GPT-2 and Llama
    heads: dict[str, tuple[int, int]]  # that ask, and that have keys and values
    calls: dict[str, int]  # of a pass in C


def record_layers(prompt: str) -> Layers:
    text = recordings.encode(prompt, 200)
    parts = {}
    heads = {}
    called = {}
    for words, name in (("GPT-2", "stories"), ("Llama", "stories-llama")):
        model = recordings.load(name)
        stages, after = (gpt_stages if name == "stories" else llama_stages)(model)
        seen = operators(name, text, stages | {after: "next layer"})
        layer = recordings.native(name).native.model.layers[1]
        sizes = sizes_of(layer, model.config)
        parts[words] = [
            Part(stage, [kind for kind, _, own in seen if own == stage], sizes[stage])
            for stage in sizes
        ]
        heads[words] = model.config.n_head, model.config.n_kv_head
        called[words] = len(calls(name, text))
    return Layers(parts, heads, called)


def gpt_stages(model) -> tuple[dict, torch.nn.Module]:
    """The modules that begin a part of the second layer, and the one behind it."""
    block = model.h[1]
    return {
        block.ln_1: "norm",
        block.attn.c_attn: "queries, keys, values",
        block.attn.c_proj: "attention out",
        block.ln_2: "norm 2",
        block.mlp.c_fc: "MLP in",
        block.mlp.c_proj: "MLP out",
    }, model.h[2]


def llama_stages(model) -> tuple[dict, torch.nn.Module]:
    block = model.layers[1]
    return {
        block.input_layernorm: "norm",
        block.self_attn.q_proj: "queries, keys, values",
        block.self_attn.o_proj: "attention out",
        block.post_attention_layernorm: "norm 2",
        block.mlp.gate_proj: "MLP in",
        block.mlp.down_proj: "MLP out",
    }, model.layers[2]


def sizes_of(layer, config) -> dict[str, str]:
    """What the struct of a layer says of each part."""

    def sizes(*structs) -> str:
        used = [each for each in structs if each.out_features]
        return f"{used[0].in_features} → " + " + ".join(str(each.out_features) for each in used)

    def norm(struct) -> str:
        return "layer norm" if struct.bias else "RMSNorm"

    return {
        "norm": norm(layer.attn_norm),
        "queries, keys, values": sizes(*layer.attn_in),
        "attention out": sizes(layer.attn_out),
        "norm 2": norm(layer.mlp_norm),
        "MLP in": sizes(*layer.mlp_in),
        "MLP out": sizes(layer.mlp_out),
    }


def draw_layers(record: Layers) -> Drawing:
    parts = []
    for name, own in record.parts.items():
        rows = [
            (
                f"{escape(part.name.removesuffix(' 2'))}<span>{escape(part.sizes)}</span>",
                tiles(part.operators, 14),
                str(len(part.operators)),
            )
            for part in own
        ]
        asking, keys = record.heads[name]
        shared = (
            "each with keys of its own" if asking == keys else f"which share the keys of {keys}"
        )
        total = sum(len(part.operators) for part in own)
        parts.append(
            panel(
                f"{name}: {total} operators in a layer",
                rows_of(rows, "rows stages"),
                f"{asking} heads, {shared}.",
            )
        )
    body = panels(*parts) + key(**WORDS)
    totals = [sum(len(part.operators) for part in own) for own in record.parts.values()]
    (gpt, llama) = (
        sum(kind == "first" for part in own for kind in part.operators)
        for own in record.parts.values()
    )
    caption = (
        f"In a layer of a Llama torch runs {totals[1]} operators, in one of GPT-2 {totals[0]}: "
        f"{llama} products for {gpt}, and turns for each query and key. In C both are the same six "
        f"parts, and a pass is one call: the products of a part write side by side."
    )
    text = "Operators in each part of a layer: " + "; ".join(
        f"{name} " + ", ".join(f"{part.name} {len(part.operators)} ({part.sizes})" for part in own)
        for name, own in record.parts.items()
    )
    return Drawing(body, caption, text + ".")


PICTURES = {  # slug of a lesson -> its picture
    "native-int8": Picture("One day", record_orders, draw_orders),
    "native-backend": Picture("Once upon a time", record_choices, draw_choices),
    "native-step": Picture("Once upon a time", record_step, draw_step),
    "native-llama": Picture("Once upon a time", record_layers, draw_layers),
}
