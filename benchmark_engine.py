"""What the engine gains, and what each of its parts costs, on one queue of requests: python benchmark_engine.py."""

import contextlib
import functools
import importlib.util
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import torch

import benchmark_common as common
import benchmark_kv_cache
import benchmark_speculative
from checkpoint import UserError, parse_name
from engine.cache import PagedCache, Span, last_logits
from engine.drafter import LookupDrafter, ModelDrafter
from engine.engine import Engine
from engine.request import Event
from infer import STORIES, Parser, generate
from load import load_model
from model import Model
from sampling import SamplingParams
from tokenizer import load_encoding

COLUMNS = {
    "part": "of the benchmark, as --only names it",
    "mode": "what ran; within a repeat all modes take turns",
    "rows": "texts computed at once, at most",
    "temperature": "0: greedy",
    "measure": "what the value is, with its unit; `x`: a ratio to another mode in the same repeat",
    "value": "as measured",
    "repeat": "each repeat runs all modes once",
    **{name: common.COLUMNS[name] for name in ("model", "draft", "dtype", *list(common.CONDITIONS)[3:])},
}
SETTING = ["model", "part", "mode", "rows", "temperature", "measure"]
STEPS = 50  # of which a median is taken
PAGE = 16  # positions
NEW = 8  # tokens after a prompt whose first token is what counts


class Results(common.ResultsFile):
    """A CSV file with a row for each value, because the parts measure different things."""

    columns, about = COLUMNS, {}  # about: what ran on what

    def write(self, part: str, mode: str, rows: int, repeat: int, values: dict, temperature: float = 0.0) -> None:
        """Add values, measure -> number, and show them on stderr."""
        setting = {"part": part, "mode": mode, "rows": rows, "temperature": temperature, "repeat": repeat}
        for measure, value in values.items():
            self.rows.append(self.about | setting | {"measure": measure, "value": value})
            self.append(self.rows[-1] | {"value": common.four_digits(value)})
        shown = "; ".join(f"{measure} {value:.4g}" for measure, value in values.items())
        print(f"{part}  {mode}  {rows} rows  temperature {temperature}  repeat {repeat}: {shown}", file=sys.stderr)

    def summarise(self, baseline):
        """A table with a line for each measure of each mode: median, min and max over the repeats."""
        import pandas

        values = pandas.DataFrame(self.rows).groupby(SETTING, sort=False)["value"]
        return values.agg(["median", "min", "max"]).map(common.four_digits).assign(runs=values.size()).reset_index()


def requests(bench, count: int, new_tokens: int | None = None) -> tuple[list[list[int]], list[SamplingParams]]:
    """The first requests of the queue, the same ones each time. new_tokens: of each; None: those of the queue."""
    draw, prompts, lengths = random.Random(0), [], []
    for _ in range(count):
        tokens = draw.randint(*bench.args.prompt_tokens)
        prompts.append([draw.randrange(bench.model.config.vocab_size) for _ in range(tokens)])
        lengths.append(draw.randint(*bench.args.new_tokens) if new_tokens is None else new_tokens)
    return prompts, [greedy(length) for length in lengths]


def greedy(length: int) -> SamplingParams:
    """Of a text of exactly that length."""
    return SamplingParams(max_new_tokens=length, ignore_eos=True)


def steps(engine: Engine, device: str, count: float = float("inf")) -> Iterator[tuple[float, list[Event]]]:
    """Step so often, or until nothing is left: the seconds of each step, and its events."""
    while engine.busy and count > 0:
        began, count = common.now(device), count - 1
        events = engine.step()
        yield common.now(device) - began, events


def start(engine: Engine, added: list, device: str) -> float:
    """Step until all of these requests have their first token: the seconds."""
    began = common.now(device)
    while not all(request.output for request in added):
        engine.step()
    return common.now(device) - began


def decoding(bench, rows: int, **options) -> Engine:
    """An engine with so many requests that have their first token, and a long way to go."""
    longest = bench.model.config.block_size - bench.args.prompt_tokens[1]
    engine = Engine(bench.model, page_size=PAGE, **{"max_rows": rows} | options)
    start(engine, [engine.add(*request) for request in zip(*requests(bench, rows, longest))], bench.device)
    return engine


def check(mode: str, texts: list[list[int]], expected: list[list[int]]) -> None:
    """Exit unless all texts are those expected."""
    wrong = sum(text != other for text, other in zip(texts, expected, strict=True))
    if wrong:
        sys.exit(f"{mode}: {wrong} of {len(texts)} texts have other tokens: no timing of wrong results")


@contextlib.contextmanager
def stopwatch(device: str, **methods):
    """The seconds in each of these methods, name -> (object, attribute), while the block runs."""
    seconds = dict.fromkeys(methods, 0.0)

    def timed(name: str, method, *arguments):
        began = common.now(device)
        result = method(*arguments)
        seconds[name] += common.now(device) - began
        return result

    for name, (owner, attribute) in methods.items():
        setattr(owner, attribute, functools.partial(timed, name, getattr(owner, attribute)))
    try:
        yield seconds
    finally:
        for owner, attribute in methods.values():
            delattr(owner, attribute)  # what is the class's shows again


def in_batches(model: Model, size: int, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """The texts of `generate`, so many at once in order of arrival, each batch until its longest is done."""
    texts = []
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        columns = zip(*generate(model, prompts[batch], params[batch]))
        texts += [[token for token in column if token is not None] for column in columns]
    return texts


def in_engine(model: Model, rows: int, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """The texts of a new engine: one that knew these prompts would not compute them again."""
    return Engine(model, rows, page_size=PAGE).run(prompts, params)


def peer(model: Model, rows: int, device: str):
    """A function of prompts and params that returns the texts of transformers' continuous batching.

    It is the manager that its `generate_batch` makes, which has one length for all requests. Without prefix sharing,
    because each repeat has the same prompts. Its thread lives only while it runs: it would slow the others down.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # It misses a package that it can do without.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    pages = rows * -(-model.config.block_size // PAGE)
    sizes = {"page_size": PAGE, "num_blocks": pages, "max_requests_per_batch": rows, "max_batch_tokens": 512}
    config = ContinuousBatchingConfig(**sizes, allow_block_sharing=False, auto_switch_to_flash=False)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        theirs = benchmark_kv_cache.load("transformers", directory, model.dtype, device)

    def run(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        manager = theirs.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), config)
        manager.start()
        try:
            found, names = {}, []
            for prompt, its in zip(prompts, params):
                names.append(manager.add_request(prompt, max_new_tokens=its.max_new_tokens, eos_token_id=-1))
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")
                if result is not None and result.error:
                    raise RuntimeError(result.error)
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
            return [found[name] for name in names]
        finally:
            manager.stop()

    return run


def throughput(bench) -> None:
    """The whole queue, one at a time, in batches as they came, in the engine, and in transformers."""
    prompts, params = requests(bench, bench.args.requests)
    modes = {("one at a time", 1): functools.partial(in_batches, bench.model, 1)}
    for name, function in (("static batches", in_batches), ("engine", in_engine)):
        modes |= {(name, rows): functools.partial(function, bench.model, rows) for rows in bench.args.rows}
    if not importlib.util.find_spec("transformers"):
        print("without transformers: pip install transformers", file=sys.stderr)
    else:
        try:
            rows = max(bench.args.rows)
            run = peer(bench.model, rows, bench.device)
            run(prompts[:2], [greedy(2)] * 2)
            modes["transformers", rows] = run
        except Exception as error:  # whatever it cannot do on this device
            print(f"without transformers: {type(error).__name__}: {error}", file=sys.stderr)
    for (_, rows), run in modes.items():  # to warm up
        run(prompts[:rows], [greedy(2)] * len(prompts[:rows]))
    for repeat in range(bench.args.repeats):
        rates, expected = {}, None
        for (name, rows), run in modes.items():
            began = common.now(bench.device)
            texts = run(prompts, params)
            rates[name, rows] = sum(map(len, texts)) / (common.now(bench.device) - began)
            expected = expected or texts
            check(f"{name}, {rows} rows", texts, expected)
            others = {"one at a time": ("one at a time", 1), "static batches": ("static batches", rows)}
            ratios = {f"x {other}": rates[name, rows] / rates[key] for other, key in others.items() if key in rates}
            bench.write(name, rows, repeat, {"tokens/s": rates[name, rows]} | ratios)


def overhead(bench) -> None:
    """Where the time of a step goes while all rows decode."""
    for repeat in range(bench.args.repeats):
        rows = max(bench.args.rows)
        engine = decoding(bench, rows)
        methods = {"hidden": (engine.model, "hidden"), "head": (engine.model, "head")}
        methods |= {"scheduling": (engine.scheduler, "schedule"), "plans": (engine.cache, "plan")}
        with stopwatch(bench.device, **methods, choosing=(engine, "compute")) as seconds:
            times = [time for time, _ in steps(engine, bench.device, STEPS)]
        model = seconds.pop("hidden") + seconds.pop("head")
        seconds["choosing"] -= model + seconds["plans"]  # what is left of `compute`
        values = {"step, ms": 1000 * statistics.median(times), "share of the engine": 1 - model / sum(times)}
        values |= {f"share of {name}": part / sum(times) for name, part in seconds.items()}
        bench.write("engine", rows, repeat, values)


def prefix(bench) -> None:
    """Requests that share their first tokens, which are computed once or, with salts, for each."""
    rows, ids = max(bench.args.rows), range(bench.model.config.vocab_size)
    draw = random.Random(0)
    first = draw.choices(ids, k=bench.args.long_prompt)
    prompts = [first + draw.choices(ids, k=NEW) for _ in range(rows)]
    for repeat in range(bench.args.repeats):
        found = {}
        for mode in ("not shared", "shared"):
            engine = Engine(bench.model, rows, page_size=PAGE)
            salts = [str(row) if mode == "not shared" else "" for row in range(rows)]
            added = [engine.add(prompt, greedy(NEW), salt) for prompt, salt in zip(prompts, salts)]
            seconds = start(engine, added, bench.device)
            for _ in steps(engine, bench.device):
                pass
            texts = [request.output for request in added]
            positions, before, expected = found.setdefault("not shared", (engine.positions, seconds, texts))
            check(mode, texts, expected)
            values = {"positions computed": engine.positions, "s to all first tokens": seconds}
            values |= {"x fewer positions": positions / engine.positions, "x as fast": before / seconds}
            bench.write(mode, rows, repeat, values)


def chunks(bench) -> None:
    """A long prompt arrives where others decode: the longest that one of them waits for its next token."""
    rows, ids = bench.args.decoding, range(bench.model.config.vocab_size)
    prompt = random.Random(0).choices(ids, k=bench.args.long_prompt)
    for repeat in range(bench.args.repeats):
        for budget, name in ((2 * rows, "in chunks"), (rows + len(prompt), "whole prompt")):
            engine = decoding(bench, rows, max_rows=rows + 1, budget=budget)
            plain = statistics.median(seconds for seconds, _ in steps(engine, bench.device, STEPS // 2))
            request, now, last, gaps, first = engine.add(prompt, greedy(NEW)), 0.0, {}, [], None
            for seconds, events in steps(engine, bench.device):
                now += seconds
                gaps += [now - last.get(event.request, 0) for event in events if event.request is not request]
                last |= {event.request: now for event in events}
                first = first or last.get(request)
                if request.finish_reason:
                    break
            values = {"plain step, ms": 1000 * plain, "longest gap, ms": 1000 * max(gaps)}
            values |= {"x plain step": max(gaps) / plain, "first token of the prompt, ms": 1000 * first}
            bench.write(f"budget {budget}, {name}", rows, repeat, values)


def queue(bench) -> None:
    """Steps with many requests waiting, and with none, in turns."""
    rows, waiting = bench.args.decoding, bench.args.waiting
    for repeat in range(bench.args.repeats):
        engines = {0: decoding(bench, rows), waiting: decoding(bench, rows)}
        for _ in range(waiting):
            engines[waiting].add([0], greedy(NEW))
        times = {number: [] for number in engines}
        for _ in range(STEPS):
            for number, engine in engines.items():
                times[number] += [seconds for seconds, _ in steps(engine, bench.device, 1)]
        medians = {number: statistics.median(of) for number, of in times.items()}
        for number, median in medians.items():
            values = {"step, ms": 1000 * median, "x nobody waiting": median / medians[0]}
            bench.write(f"{number} waiting", rows, repeat, values)


def waste(bench) -> None:
    """Positions that running requests hold and do not use, over all steps of the queue; time changes nothing here."""
    rows, block_size = max(bench.args.rows), bench.model.config.block_size
    engine, unused, windows = Engine(bench.model, rows, page_size=PAGE), [], []
    for request in zip(*requests(bench, bench.args.requests)):
        engine.add(*request)
    for _ in steps(engine, bench.device):
        for request in engine.scheduler.running:
            if request.output:  # its prompt is computed
                unused.append(len(request.pages) * PAGE - request.computed)
                windows.append(block_size - request.computed)
    for mode, each in ((f"pages of {PAGE}", unused), ("a whole window each", windows)):
        values = {"unused positions a request, mean": statistics.mean(each), "unused, most": max(each)}
        bench.write(mode, rows, 0, values)


def speculation(bench) -> None:
    """The engine with drafts against the engine alone, on beginnings of stories, and what a cost model says of it."""
    args, model, device, gamma = bench.args, bench.model, bench.device, bench.args.gamma
    draft = load_model(args.draft, torch.float32, device)
    encoding, length = load_encoding(args.model, model.config.vocab_size), sum(args.new_tokens) // 2
    texts = [encoding.encode(text) for text in benchmark_speculative.PROMPTS]
    starts = [texts[row % len(texts)] for row in range(max(args.draft_rows))]
    begin = [SamplingParams(2 * NEW, ignore_eos=True, temperature=0.8, seed=row) for row in range(len(starts))]
    prompts = [start + text for start, text in zip(starts, in_engine(model, len(starts), starts, begin))]
    modes = {"engine": lambda rows: None, "look-up": lambda rows: LookupDrafter()}
    modes["draft model"] = lambda rows: ModelDrafter(draft, model, rows, PAGE)
    past = len(prompts[0]) + length // 2  # on average
    for repeat, rows in [(repeat, rows) for repeat in range(args.repeats) for rows in args.draft_rows]:
        cost = {count: pass_seconds(model, rows, count, past, device) for count in (1, gamma + 1)}
        ratio = cost[gamma + 1] / cost[1]
        bench.write("passes", rows, repeat, {"pass, ms": 1000 * cost[1], f"x with {gamma + 1} tokens a row": ratio})
        for temperature in args.temperature:
            for mode, drafter in modes.items():
                engine = Engine(model, rows, page_size=PAGE, drafter=drafter(rows), gamma=gamma)
                seeds = [repeat * rows + row for row in range(rows)]
                params = [SamplingParams(length, True, temperature, seed=seed) for seed in seeds]
                added = [engine.add(*request) for request in zip(prompts, params)]
                run = decode(engine, added, device)
                if mode == "engine":
                    alone = run
                if temperature == 0:
                    check(mode, run.texts, alone.texts)
                values = {"tokens/s": run.rate, "x engine": run.rate / alone.rate, "tokens a pass": run.tokens_per_pass}
                if mode != "engine":
                    wider = 1 + (ratio - 1) * (run.width - 1) / gamma  # few drafts, few positions
                    values |= {"tokens a row": run.width, "drafting, ms a step": 1000 * run.drafting}
                    values["x engine, predicted"] = run.tokens_per_pass * cost[1] / (wider * cost[1] + run.drafting)
                    same = sum(text == other for text, other in zip(run.texts, alone.texts))
                    values |= {"share of equal texts": same / rows} | run.acceptance
                bench.write(mode, rows, repeat, values, temperature)


def decode(engine: Engine, added: list, device: str) -> SimpleNamespace:
    """Run an engine, and measure it from when all requests have their first token."""
    start(engine, added, device)
    counted = engine.positions, engine.drafted, engine.accepted, sum(len(request.output) for request in added)
    watched = {"drafting": (engine.drafter, "propose")} if engine.drafter else {}
    with stopwatch(device, **watched) as seconds:
        times, events = zip(*steps(engine, device))
    after = engine.positions, engine.drafted, engine.accepted, sum(len(request.output) for request in added)
    positions, drafted, accepted, tokens = (now - before for now, before in zip(after, counted))
    passes = sum(map(len, events))  # of a row each
    return SimpleNamespace(
        texts=[request.output for request in added],
        rate=tokens / sum(times),
        tokens_per_pass=tokens / passes,
        width=positions / passes,
        drafting=seconds.get("drafting", 0) / len(times),
        acceptance={"acceptance": accepted / drafted} if drafted else {},
    )


@torch.inference_mode()
def pass_seconds(model: Model, rows: int, count: int, past: int, device: str) -> float:
    """The median seconds of a pass of so many tokens of each row, with that many positions before them."""
    pages = -(-(past + count) // PAGE)
    cache = PagedCache(model, rows * pages, PAGE)
    spans = [Span(list(range(row * pages, (row + 1) * pages)), past, [0] * count) for row in range(rows)]
    times = []
    for _ in range(STEPS // 2):
        began = common.now(device)
        last_logits(model, cache, spans, [count] * rows)
        times.append(common.now(device) - began)
    return statistics.median(times)


PARTS = (throughput, overhead, prefix, chunks, queue, waste, speculation)


def measure(args, device: str, results: Results) -> None:
    """Run the parts asked for. Raises UserError for bad options."""
    for name in ("prompt_tokens", "new_tokens"):
        if getattr(args, name)[0] > getattr(args, name)[1]:
            raise UserError(f"--{name.replace('_', '-')}: the first number is the smallest, the second the largest")
    longest = args.prompt_tokens[1] + max(args.new_tokens[1], STEPS + 2 * NEW), args.long_prompt + 2 * NEW
    common.models_that_fit([args.model], max(longest))
    parts = [part for part in PARTS if part.__name__ in args.only]
    if speculation in parts and (wrong := [n for n in (args.model, args.draft) if parse_name(n).kind == "random"]):
        raise UserError(f"{wrong[0]}: a random model agrees with no other; leave speculation out, with --only")
    for temperature in args.temperature:
        SamplingParams(temperature=temperature)  # checks it
    model = load_model(args.model, torch.float32, device)
    results.about = common.describe(args.model, model, device, args.draft if speculation in parts else "")
    for part in parts:
        write = functools.partial(results.write, part.__name__)
        part(SimpleNamespace(args=args, model=model, device=device, write=write))


def plot(summary):
    """Tokens/s by mode, the longest gaps, and speed-ups by drafts: a panel for each part that ran."""
    from matplotlib.figure import Figure

    drawn = {"throughput": draw_throughput, "chunks": draw_gaps, "speculation": draw_speculation}
    drawn = {name: draw for name, draw in drawn.items() if name in set(summary["part"])}
    figure = Figure(figsize=(5.5 * max(len(drawn), 1), 4.5), layout="constrained")
    for axes, (name, draw) in zip(figure.subplots(1, max(len(drawn), 1), squeeze=False)[0], drawn.items()):
        draw(axes, summary[summary["part"] == name])
    figure.suptitle("The engine, greedy but for speculation at another temperature: median, min and max")
    return figure


def spread(rows):
    """How far the smallest and the largest are from the median, as matplotlib takes it."""
    return [rows["median"] - rows["min"], rows["max"] - rows["median"]]


def draw_throughput(axes, rows) -> None:
    rows = rows[rows["measure"] == "tokens/s"][::-1]
    names = [mode if size == 1 else f"{mode}, {size} rows" for mode, size in zip(rows["mode"], rows["rows"])]
    colors = ["C1" if mode == "engine" else "C0" for mode in rows["mode"]]
    bars = axes.barh(names, rows["median"], xerr=spread(rows), capsize=3, color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=6, fontsize="small")
    axes.margins(x=0.12)
    axes.set(xlabel="tokens/s in all texts, prefill included", title="The whole queue")


def draw_gaps(axes, rows) -> None:
    plain, gaps = (rows[rows["measure"] == name] for name in ("plain step, ms", "longest gap, ms"))
    for shift, what, label in ((-0.2, plain, "a step before it came"), (0.2, gaps, "longest gap while it is computed")):
        axes.bar(
            [at + shift for at in range(len(what))], what["median"], 0.4, yerr=spread(what), capsize=3, label=label
        )
    axes.set_xticks(range(len(gaps)), gaps["mode"])
    axes.set(ylabel="ms", title=f"A long prompt arrives among {gaps['rows'].iloc[0]} that decode")
    axes.legend(fontsize="small")


def draw_speculation(axes, rows) -> None:
    sizes = sorted(set(rows["rows"]))
    lines = rows[rows["measure"].str.startswith("x engine") & (rows["mode"] != "engine")]
    for index, ((mode, temperature), points) in enumerate(lines.groupby(["mode", "temperature"], sort=False)):
        measured, predicted = (points[points["measure"] == name] for name in ("x engine", "x engine, predicted"))
        at = [sizes.index(size) + 0.06 * (index - 1.5) for size in measured["rows"]]
        style = {"marker": "o", "capsize": 3, "label": f"{mode}, temperature {temperature}", "color": f"C{index}"}
        axes.errorbar(at, measured["median"], yerr=spread(measured), **style)
        axes.plot(at, predicted["median"], "x", color=f"C{index}")
    axes.plot([], [], "x", color="grey", label="predicted by the cost model")
    axes.axhline(1, color="grey", linestyle="--", label="the engine alone")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(xlabel="rows", ylabel="tokens/s / those of the engine alone", ylim=(0, None), title="Speculation")
    axes.legend(fontsize="x-small")


def main(argv=None) -> None:
    parts = "; ".join(
        f"{part.__name__}: {part.__doc__[0].lower()}{part.__doc__.partition('.')[0][1:]}" for part in PARTS
    )
    parser = Parser(description=f"Time the engine, greedy, in float32. {parts}.")
    number, names = common.whole_number(1), [part.__name__ for part in PARTS]
    parser.add_argument("--only", **common.LIST, default=names, choices=names, metavar="PART", help="what to run")
    parser.add_argument("--model", default=STORIES, help="directory or name as in infer.py")
    parser.add_argument("--draft", default=STORIES.with_name("stories-draft"), help="a smaller one, same vocabulary")
    parser.add_argument("--requests", type=number, default=64, help="in the queue")
    pair = {"nargs": 2, "type": number, "metavar": ("LEAST", "MOST")}
    parser.add_argument("--prompt-tokens", **pair, default=[5, 60], help="random ids in each prompt")
    parser.add_argument("--new-tokens", **pair, default=[20, 180], help="after each of them; EOS is ignored")
    parser.add_argument("--rows", type=number, **common.LIST, default=[8, 32], help="of the engine, and of batches")
    parser.add_argument("--long-prompt", type=number, default=200, help="tokens that are shared, or arrive at once")
    parser.add_argument("--decoding", type=number, default=16, help="rows where a prompt arrives, or others wait")
    parser.add_argument("--waiting", type=number, default=10_000, help="requests behind those that run")
    parser.add_argument("--draft-rows", type=number, **common.LIST, default=[1, 4, 16], help="rows with drafts")
    parser.add_argument("--gamma", type=common.whole_number(1, 16), default=3, help="drafts a row and pass, 1 to 16")
    parser.add_argument("--temperature", type=float, **common.LIST, default=[0.0, 0.8], help="of speculation")
    common.add_options(parser, "engine_cpu.csv", lengths=None, repeats=2, dtypes=False, columns=COLUMNS)
    common.run_benchmark(parser, measure, None, plot, argv, Results)


if __name__ == "__main__":
    main()
