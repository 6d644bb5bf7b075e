"""Pictures of lessons 27 and 50 to 53: how often and in which order C reads weights, and pages."""

import re
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lessons as course
from book import recordings
from book.compiled import differing
from book.draw import (
    Drawing,
    Picture,
    bars,
    box,
    dot,
    escape,
    key,
    label,
    panel,
    panels,
    path,
    signed,
    svg,
    token,
)
from book.numbers import first_product
from cache import KVCache
from engine.cache import PagedCache
from engine.engine import Engine
from errors import UserError
from infer import pass_logits
from int8 import quantize
from native.linear import pack
from runner import last_logits
from sampling import SamplingParams


class Order(NamedTuple):
    """The weights of a few outputs, read in one order."""

    name: str
    lines: list[int]  # of memory, in the order in which they are read
    sums: list[float]  # of each output
    speed: int  # GB/s, as the lesson's message has it


class Reading(NamedTuple):
    orders: list[Order]
    bytes: int  # of the weights that a token is multiplied with


LINE = 16  # weights in the 64 bytes that memory brings at once


@torch.inference_mode()
def record_reading(prompt: str, outputs: int = 4) -> Reading:
    weight, x = first_product(prompt)
    try:
        _, all_lessons = course.read_main()
        message = course.message(course.find(all_lessons, "native-linear"))
    except course.LessonError as error:
        raise UserError(str(error)) from None
    slow, fast = re.search(r"\((\d+)\s+GB/s\s+instead\s+of\s+(\d+)", message).groups()
    starts = range(0, len(x), LINE)
    orders = {
        "One row after the other": ([(o, i) for o in range(outputs) for i in starts], fast),
        f"{outputs} rows side by side": ([(o, i) for i in starts for o in range(outputs)], slow),
    }
    found = []
    for name, (order, speed) in orders.items():
        lines = []
        sums = [0.0] * outputs
        for output, start in order:
            part = weight[output, start : start + LINE]
            lines.append(part.storage_offset() // LINE)
            sums[output] += (part @ x[start : start + LINE]).item()
        found.append(Order(name, lines, sums, int(speed)))
    layers = recordings.load().modules()
    linears = (layer.weight.nbytes for layer in layers if isinstance(layer, torch.nn.Linear))
    return Reading(found, sum(linears))


def draw_reading(record: Reading) -> Drawing:
    parts = []
    names = ("as C reads", "slower")
    for order, kind, name in zip(record.orders, ("good", "bad"), names):
        beside = sum(b == a + 1 for a, b in zip(order.lines, order.lines[1:]))
        note = f"The next line lies beside the last one {beside} of {len(order.lines) - 1} times."
        parts.append(panel(f"{order.name}: {name}", way_of(order, kind), note))
    fast, slow = record.orders
    body = panels(*parts) + (
        f'<p class="note">A cache line, what memory sends at once, is 64 bytes, {LINE} weights. A '
        "band is a row of weights, its places in memory from top to bottom. On the machine where "
        f"this code was first measured weights came at {fast.speed} GB/s one row after the "
        f"other, at {slow.speed} with {len(slow.sums)} rows side by side.</p>"
    )
    caption = (
        f"A token is multiplied with {record.bytes / 1e6:.1f} MB of weights, each used once, so "
        "memory sets the speed. It is fastest where it can foresee the next read: for few tokens "
        "C reads a row to its end, then the next."
    )
    text = "Which line of memory is read, over time: " + "; ".join(
        f"{order.name} {order.lines[:8]} and so on, {order.speed} GB/s" for order in record.orders
    )
    return Drawing(body, caption, text + f". Sums of {len(fast.sums)} outputs.")


def way_of(order: Order, kind: str, wide: int = 240, high: int = 36) -> str:
    """From left to right the reads, from top to bottom the places in memory, row by row."""
    outputs = len(order.sums)
    count = len(order.lines)
    body = ""
    for output, total in enumerate(order.sums):
        body += box(44, output * high, wide, high - 2, "empty")
        body += label(0, (output + 0.6) * high, f"row {output}")
        body += label(48 + wide, (output + 0.6) * high, signed(total))
    places = [
        (44 + (at + 0.5) / count * wide, (line + 0.5) / count * outputs * high)
        for at, line in enumerate(order.lines)
    ]
    body += path(places, kind) + label(44, outputs * high + 14, "time \u2192")
    body += label(48 + wide, outputs * high + 14, "sums")
    return svg(wide + 84, outputs * high + 18, body, "chart")


class Cell(NamedTuple):
    """A place in memory."""

    value: float
    output: int | None  # whose weight it is, None for a zero that fills up
    input: int | None


class Layout(NamedTuple):
    """A small weight in memory, before and after packing, and its product with an input."""

    x: list[float]  # (in)
    before: list[Cell]
    after: list[Cell]
    width: int  # outputs in a panel


WIDTH = 4  # outputs in a panel, so that it can be drawn; on a processor 8, 16 or 32


def cells(values: torch.Tensor, places: torch.Tensor, inputs: int) -> list[Cell]:
    """places: 1 for the first weight, row by row, and so on; 0 for a zero that fills up."""
    return [
        Cell(value, *((place - 1) // inputs, (place - 1) % inputs) if place else (None, None))
        for value, place in zip(values.flatten().tolist(), places.flatten().int().tolist())
    ]


def record_layout(prompt: str, outputs: int = 6, inputs: int = 4) -> Layout:
    weight, x = (each[..., :inputs] for each in first_product(prompt))
    weight = weight[:outputs].clone()  # a corner of it
    places = torch.arange(1.0, outputs * inputs + 1).view(outputs, inputs)
    before = cells(weight, places, inputs)
    packed = [
        torch.cat([part.flatten() for part in pack(each, WIDTH)]).view(torch.float32)
        for each in (weight, places)
    ]
    return Layout(x.tolist(), before, cells(*packed, inputs), WIDTH)


def vector(own: list[Cell], begin: str, end: str, digits: int = 3) -> str:
    """A row of memory: what stands before it, its numbers, what stands behind."""
    shown = "".join(
        f'<td class="{"pad" if cell.output is None else f"tint{cell.output}"}">'
        f"{signed(cell.value, digits)}</td>"
        for cell in own
    )
    return f'<tr><th scope="row">{begin}</th>{shown}<td class="value">{end}</td></tr>'


def draw_layout(record: Layout) -> Drawing:
    width = record.width
    before = ""
    for start in range(0, len(record.before), width):
        own = record.before[start : start + width]
        total = sum(cell.value * record.x[cell.input] for cell in own)
        output = own[0].output
        sums = f'<b class="tint{output}">{signed(total, 3)}</b>'
        before += vector(own, f"row {output}", sums)
    across = "".join(f'<td class="x">{signed(x)}</td>' for x in record.x)
    before = f'<tr><th scope="row">times x</th>{across}<td class="value">sum</td></tr>{before}'
    after = ""
    size = width * len(record.x)
    for start in range(0, len(record.after), size):
        held = record.after[start : start + size]
        lanes = [0.0] * width
        for number, x in enumerate(record.x):
            own = held[number * width : (number + 1) * width]
            after += vector(own, f"{signed(x)} &times;", "")
            for lane, cell in enumerate(own):
                lanes[lane] += x * cell.value
        sums = [Cell(total, cell.output, None) for total, cell in zip(lanes, held)]
        after += vector(sums, "sums", "").replace("<tr>", '<tr class="sum">')
    body = panels(
        panel(
            "Before: row by row",
            f'<table class="memory">{before}</table>',
            "A line is a vector: neighbours in memory, computed at once. A colour is an output. "
            "The products of a vector have to be added to one number.",
        ),
        panel(
            f"After: panels of {width} outputs",
            f'<table class="memory">{after}</table>',
            "A line has a weight of each output, times one number of x. Each sum takes its inputs "
            "in their order, whatever else is computed. The second panel is filled up with zeros. "
            f"A vector has {width} numbers here and a panel {width} outputs; more on a processor.",
        ),
    )
    caption = (
        f"Weights are rearranged so that a processor adds up {width} outputs at once. Row by row, "
        f"the {width} products of one output had still to be added to each other."
    )
    text = (
        f"Two tables of {len(record.before)} weights in memory: row by row, and in panels of "
        f"{width} outputs, input by input. Before: {shown(record.before)}. After: "
        f"{shown(record.after)}."
    )
    return Drawing(body, caption, text)


def shown(own: list[Cell]) -> str:
    """Output and input of each place, in words."""
    return " ".join("0" if cell.output is None else f"{cell.output}.{cell.input}" for cell in own)


class Lanes(NamedTuple):
    """Weights in int8, packed in groups of four inputs, and one of the products."""

    memory: list[Cell]  # in the order of memory
    x: list[int]  # all values
    weights: list[int]  # of the first output and the first four inputs
    taken: int  # back from its sum, for what was added to the values


GROUP = 4  # weights of one output side by side
ADDED = 128  # to each value, because the instruction takes unsigned ones


def record_lanes(prompt: str, outputs: int = 4, inputs: int = 8) -> Lanes:
    weight, x = (each[..., :inputs] for each in first_product(prompt))
    weight = weight[:outputs].clone()  # a corner of it
    values, _ = quantize(weight)
    places = torch.arange(1, outputs * inputs + 1, dtype=torch.int8).view(outputs, inputs)
    memory = [pack(each.clone(), outputs, GROUP)[0].view(torch.int8) for each in (values, places)]
    own = values[0, :GROUP]
    return Lanes(
        cells(*memory, inputs),
        quantize(x)[0].tolist(),
        own.tolist(),
        -ADDED * own.sum(dtype=torch.int32).item(),
    )


def draw_lanes(record: Lanes) -> Drawing:
    rows = ""
    wide = len({cell.output for cell in record.memory}) * GROUP
    first = " worked"  # the box that is worked out
    for start in range(0, len(record.memory), wide):
        own = record.memory[start : start + wide]
        inputs = own[0].input
        groups = "".join(
            f'<span class="lane{first * (start == at == 0)}">'
            + "".join(
                f'<i class="tint{cell.output}">{signed(cell.value, 0)}</i>'
                for cell in own[at : at + GROUP]
            )
            + "</span>"
            for at in range(0, wide, GROUP)
        )
        rows += f'<p class="title">inputs {inputs} to {inputs + GROUP - 1}</p>'
        rows += f'<p class="lanes">{groups}</p>'
    values = record.x[:GROUP]
    raised = [value + ADDED for value in values]
    products = [a * b for a, b in zip(raised, record.weights)]
    lines = {
        "x": values,
        f"x + {ADDED}": raised,
        "weights": record.weights,
        "products": products,
    }
    table = ""
    for name, numbers in lines.items():
        total = ""
        if name == "products":
            total = f"<b>{signed(sum(numbers), 0)}</b>"
        kind = f' class="tint{record.memory[0].output}"' if name == "weights" else ""
        numbers = "".join(f"<td{kind}>{signed(number, 0)}</td>" for number in numbers)
        table += f'<tr><th scope="row">{name}</th>{numbers}<td>{total}</td></tr>'
    weights = " + ".join(f"({w})" if w < 0 else str(w) for w in record.weights)
    result = sum(products) + record.taken
    for name, number in (("taken back", record.taken), ("sum of x w", result)):
        number = f"<td><b>{signed(number, 0)}</b></td>"
        table += f'<tr><th scope="row">{name}</th><td colspan="{GROUP}"></td>{number}</tr>'
    table = f'<div class="worked"><table class="figures">{table}</table></div>'
    body = panels(
        panel(
            "Four outputs of a panel, in memory",
            rows,
            "A colour is an output. A box has four weights of it, for the four inputs named above. "
            "A panel has more outputs on a processor, 32 with AVX-512.",
        ),
        panel(
            "The framed box, worked out",
            table,
            f"The instruction wants x without a sign, so {ADDED} is added. Taken back: "
            f"{ADDED} &times; ({escape(weights).replace('-', '&minus;')}), known when the weights "
            "are packed.",
        ),
    )
    caption = (
        "One instruction of newer processors (AVX-512 VNNI) adds four products to the sum of each "
        "output; that of lesson 25 adds two. So four weights of an output lie side by side."
    )
    text = (
        f"Weights of {wide // GROUP} outputs in groups of {GROUP}: {shown(record.memory)}. One "
        f"group: values {values}, weights {record.weights}, {sum(products)} with {ADDED} added, "
        f"{record.taken} taken back, {result} left."
    )
    return Drawing(body, caption, text)


class Way(NamedTuple):
    """A text cut into passes, and a logit at its end."""

    passes: list[list[str]]  # tokens of each
    beside: int  # other texts in the same passes
    torch: float
    native: float
    size: int  # of the vocabulary: so many logits
    apart: tuple[int, int]  # logits with other bits than in the first way, in torch and in C


@torch.inference_mode()
def record_ways(prompt: str, others: int = 7) -> list[Way]:
    text = recordings.encode(prompt, 8)
    half = len(text) // 2
    parts = [[text[:half], text[half:]], [[id] for id in text]] if half else []
    cuts = [([text], 0), *((each, 0) for each in parts), ([text], others)]
    models = recordings.load(), recordings.native()
    first = [last_of(model, [text], 0) for model in models]
    best = first[0].argmax()
    ways = []
    for passes, beside in cuts:
        logits = [last_of(model, passes, beside) for model in models]
        apart = tuple((a != b).sum().item() for a, b in zip(logits, first))
        words = [[recordings.text_of(id) for id in each] for each in passes]
        ways.append(Way(words, beside, *(row[best].item() for row in logits), len(first[0]), apart))
    return ways


def last_of(model, passes: list[list[int]], beside: int) -> torch.Tensor:
    """The logits after a text, which other texts of its length accompany."""
    cache = KVCache(model, 1 + beside)
    rows = list(range(1 + beside))
    for tokens in passes:
        logits = pass_logits(model, [tokens, *[tokens[::-1]] * beside], rows, cache, 1)
    return logits[0, -1]


ONCE = 16  # tokens of a pass in C until lesson 52


def draw_ways(record: list[Way]) -> Drawing:
    rows = ""
    eager = differing([f"{way.torch:.7f}" for way in record], f"{record[0].torch:.7f}")
    native = differing([f"{way.native:.7f}" for way in record], f"{record[0].native:.7f}")
    for way, *numbers in zip(record, eager, native):
        parts = "".join(
            f'<span class="pass">{"".join(token(text) for text in each)}</span>'
            for each in way.passes
        )
        others = f" and {way.beside} other texts" if way.beside else ""
        results = "".join(
            f'<span class="result">{name} <b>{number}</b> <small>'
            f"{f'{count:,} logits changed' if count else 'none changed'}</small></span>"
            for name, number, count in zip(("torch", "C"), numbers, way.apart)
        )
        rows += f'<li><span class="cuts">{parts}{others}</span>{results}</li>'
    largest = max((1 + way.beside) * max(map(len, way.passes)) for way in record)
    new = (
        f" The last line is a pass of {largest} tokens: until this lesson passes of more than "
        f"{ONCE} were torch&rsquo;s, but for their products."
        if largest > ONCE
        else ""
    )
    body = f'<ul class="ways">{rows}</ul>' + (
        f'<p class="note">A box is a pass. A logit is a score, one for each of '
        f"{record[0].size:,} tokens; the number is the largest, and changed are those that have "
        "other bits than in the first line. In C no sum is made in an order that depends on how "
        f"many tokens there are.{new}</p>"
    )
    different = [max(way.apart[at] for way in record) for at in (0, 1)]
    eager = f"up to {different[0]:,} get other bits" if different[0] else "too"
    own = "all keep their bits" if not different[1] else f"{different[1]:,} change"
    caption = (
        f"One text, cut into passes in {len(record)} ways, and the {record[0].size:,} logits after "
        f"it: in C {own}, in torch {eager}."
    )
    text = "A logit after the text, in torch and in C: " + "; ".join(
        f"{len(way.passes)} passes and {way.beside} other texts {way.torch:.7f} and "
        f"{way.native:.7f}, {way.apart[0]} and {way.apart[1]} logits with other bits"
        for way in record
    )
    return Drawing(body, caption, text + ".")


class Pages(NamedTuple):
    """A step of an engine, and what attention reads in it."""

    owners: list[int | None]  # of each page: which of the step's texts
    pages: list[int]  # of the text whose query is drawn, in order
    words: list[list[str]]  # on each of these
    positions: list[int]  # of each text
    size: int  # positions on a page
    bytes: int  # of a position
    copied: int  # bytes that the gather of a step writes


NUM_PAGES = 10
PAGE_SIZE = 4


@torch.inference_mode()
def record_pages(prompt: str) -> Pages:
    """Four texts in three rows: when the last one runs, the first has left."""
    ids = recordings.encode(prompt, 6)
    model = recordings.native()
    engine = Engine(model, max_rows=3, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    options = {"ignore_eos": True, "temperature": 1.0}
    requests = [
        engine.add(ids, SamplingParams(length, seed=seed, **options), str(seed))
        for seed, length in enumerate((4, 20, 16, 14))
    ]
    seen = []
    compute = model.runner.compute

    def noted(storage, spans, keep):
        before = storage.clone()
        seen[:] = [(before, spans, keep)]
        return compute(storage, spans, keep)

    with mock.patch.object(model.runner, "compute", noted):
        while requests[3].computed < 10 and engine.busy:
            engine.step()
    ((storage, spans, keep),) = seen
    asking = requests[3]
    last = next(span for span in spans if span.pages == asking.pages)
    owners = [None] * NUM_PAGES
    for number, span in enumerate(spans):
        for page in span.pages:
            owners[page] = number
    held = [recordings.text_of(id) for id in asking.window[: last.start + len(last.tokens)]]
    config = model.config
    size = 2 * config.n_layer * config.n_kv_head * config.head_dim * storage.itemsize
    return Pages(
        owners,
        list(last.pages),
        [held[at : at + PAGE_SIZE] for at in range(0, len(held), PAGE_SIZE)],
        [span.start + len(span.tokens) for span in spans],
        PAGE_SIZE,
        size,
        gathered(storage, spans, keep),
    )


def gathered(storage: torch.Tensor, spans: list, keep: list[int]) -> int:
    """The bytes that torch copies out of the pages in the same step."""
    model = recordings.load()
    cache = PagedCache(model, storage.shape[2], storage.shape[4])
    cache.storage.copy_(storage)
    sizes = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ == "index_select":
                sizes.append(result.nbytes)
            return result

    with Copies():
        last_logits(model, cache, spans, keep)
    return sum(sizes)


def draw_pages(record: Pages) -> Drawing:
    used = len(record.words)
    reads = sum(record.positions) * record.bytes
    traffic = [
        ("torch", 3 * record.copied, f"{3 * record.copied / 1e6:.2f} MB", "second"),
        ("C", reads, f"{reads / 1e6:.2f} MB", "first"),
    ]
    legend = key(
        second="pages of this text", kept="of other texts", empty="free", other="a copy, in order"
    )
    order = ", ".join(map(str, record.pages[:used]))
    body = panels(
        panel(f"torch: copy pages {order} side by side, then attend", route(record, copy=True)),
        panel("C: read the pages where they are", route(record, copy=False)),
    )
    body += legend + '<p class="title one">Keys and values moved in this step</p>' + bars(traffic)
    lengths = " and ".join(map(str, record.positions))
    whole = sum(-(-count // record.size) for count in record.positions) * record.size * record.bytes
    padding = " and padding" * (record.copied > whole)
    body += (
        f'<p class="note">{len(record.positions)} texts of {lengths} '
        f"positions, {record.bytes:,} bytes each. torch reads {record.copied:,} bytes, whole pages"
        f"{padding}, writes them and reads them again. The text that is drawn lies on pages "
        f"{order}, of {record.size} tokens each.</p>"
    )
    caption = (
        "torch copies the pages of a text side by side before a query reads them; C reads them "
        f"where they are: {reads / 1e6:.2f} MB move instead of {3 * record.copied / 1e6:.2f}."
    )
    tokens = "; ".join(f"page {page} {words}" for page, words in zip(record.pages, record.words))
    text = (
        f"Two drawings of a pool of {len(record.owners)} pages: {tokens}. With a copy {order} lie "
        f"side by side before a query reads them; without it, the query reads each in its place. "
        f"{3 * record.copied} bytes against {reads}."
    )
    return Drawing(body, caption, text)


def route(record: Pages, copy: bool, side: int = 30) -> str:
    """The pool, and how a query gets to the keys of its text: by a copy or by itself."""
    width = len(record.owners) * (side + 3) + 4
    used = len(record.words)
    body = label(2, 12, "pages of the pool", "soft")
    height = 168
    asked = (width / 2, height - 14)
    left = width / 2 - used * (side + 3) / 2
    lines = ""
    for page, owner in enumerate(record.owners):
        x = 2 + page * (side + 3)
        own = page in record.pages[:used]
        kind = "second" if own else "empty" if owner is None else "kept"
        body += box(x, 36, side, 22, kind)
        body += label(x + side / 2, 32, str(page), "middle")
        if not own:
            continue
        order = record.pages.index(page)
        middle = left + order * (side + 3) + side / 2
        end = (middle, 92) if copy else asked
        lines += path([(x + side / 2, 58), end], "second")
        if copy:
            body += box(middle - side / 2, 92, side, 22, "other")
            lines += path([(middle, 114), asked], "other")
    body += lines + dot(*asked, "first") + label(asked[0] + 10, asked[1] + 5, "query")
    return svg(width, height, body, "chart")


INPUT = "A prompt of your own is another input for the same weights"
PICTURES = {  # slug of a lesson -> its picture
    "native-linear": Picture("Once upon a time", record_reading, draw_reading, own=INPUT),
    "packed-weights": Picture("Once upon a time", record_layout, draw_layout, own=INPUT),
    "packed-int8": Picture("Once upon a time", record_lanes, draw_lanes, own=INPUT),
    "native-batches": Picture("Once upon a time", record_ways, draw_ways),
    "native-pages": Picture("Lily saw", record_pages, draw_pages),
}
