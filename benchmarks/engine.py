"""Benchmarks of the engine and of each of its parts: python -m benchmarks.engine."""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

import benchmark_kv_cache
import benchmark_speculative
from benchmarks import common
from cache import Span
from command_line.models import load_head, names_draft_head
from command_line.options import STORIES
from command_line.parser import Parser
from draft_head import DraftHead
from engine.cache import PagedCache
from engine.drafter import (
    AdaptiveSpeculation,
    PagedHeadDrafter,
    PagedModelDrafter,
    PromptLookupDrafter,
)
from engine.engine import Engine
from engine.pages import page_count
from engine.request import Event, Request
from errors import UserError
from infer import generate
from loading.load import load_model, resolve_source, save_model
from model import Model
from native import NativeRunner, use_native
from sampling import SamplingParams
from text.tokenizer import load_encoding

COLUMNS = {
    "part": "part of the benchmark, as in --only",
    "backend": "torch, native (C code), both in float32, or native int8",
    "mode": "mode of the engine; all modes take turns within a repeat",
    "batch_size": "maximum number of sequences per step",
    "temperature": "0: greedy",
    "measure": "measure and its unit; `x`: ratio to another mode in the same repeat",
    "value": "as measured",
    "repeat": "each repeat runs all modes once",
}
COLUMNS = common.columns(COLUMNS)
SETTING = ["model", "part", "backend", "mode", "batch_size", "temperature", "measure"]
STEPS = 50  # timed steps, for their median
PAGE = 16  # positions per page
NEW = 8  # new tokens of a request that is timed for its first token
BACKENDS = {"torch": torch.float32, "native": torch.float32, "native int8": torch.int8}
SAMPLERS = {  # name -> sampling parameters
    "greedy": {},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
}


class Results(common.MetricsFile):
    """A CSV file with a row for each value."""

    columns = COLUMNS
    setting = SETTING

    def write(
        self,
        part: str,
        backend: str,
        mode: str,
        batch_size: int,
        repeat: int,
        values: dict,
        temperature: float = 0.0,
        library: str = "",
    ) -> None:
        """Add values, measure -> number."""
        run = {"part": part, "backend": backend, "mode": mode, "batch_size": batch_size}
        run |= {"temperature": temperature, "repeat": repeat, "library": library}
        run["dtype"] = str(BACKENDS[backend]).removeprefix("torch.")
        which = (
            f"{part}  {mode}, {backend}, batch {batch_size}  "
            f"temperature {temperature}  repeat {repeat}"
        )
        self.add(which, run, values)


class Bench(NamedTuple):
    """The options, models and output of a part of the benchmark."""

    args: argparse.Namespace
    backend: str
    model: Model
    draft: Model | None  # draft model or head, for speculation
    write: Callable  # Results.write, for this part and backend


# Shared by the parts


def greedy(length: int) -> SamplingParams:
    """Return greedy sampling parameters for exactly `length` new tokens."""
    return SamplingParams(max_new_tokens=length, ignore_eos=True)


def sample_requests(bench: Bench, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return the first `count` requests of the queue, the same ones in each call."""
    draw = random.Random(0)
    prompts = []
    params = []
    for _ in range(count):
        tokens = draw.randint(*bench.args.prompt_tokens)
        prompts.append([draw.randrange(bench.model.config.vocab_size) for _ in range(tokens)])
        params.append(greedy(draw.randint(*bench.args.new_tokens)))
    return prompts, params


def now(model: Model) -> float:
    """Return the time in seconds, after the model's device has finished."""
    return common.now(model.device.type)


def timed_steps(engine: Engine) -> Iterator[tuple[float, list[Event]]]:
    """Step until the engine is idle; yield the seconds and the events of each step."""
    while engine.busy:
        began = now(engine.model)
        events = engine.step()
        yield now(engine.model) - began, events


def run_prefill(engine: Engine, requests: list[Request]) -> float:
    """Step until all of these requests have their first token; return the seconds."""
    total = 0.0
    for seconds, _ in timed_steps(engine):
        total += seconds
        if all(request.output for request in requests):
            break
    return total


def decoding_engine(bench: Bench, batch_size: int, **options) -> Engine:
    """Return an engine with `batch_size` prefilled requests that have many tokens to decode."""
    longest = bench.model.config.block_size - bench.args.prompt_tokens[1]
    engine = Engine(bench.model, page_size=PAGE, **{"max_num_seqs": batch_size} | options)
    prompts, _ = sample_requests(bench, batch_size)
    run_prefill(engine, [engine.add(prompt, greedy(longest)) for prompt in prompts])
    return engine


def check(mode: str, outputs: list[list[int]], expected: list[list[int]]) -> None:
    """Exit unless all outputs are the expected ones."""
    wrong = sum(output != other for output, other in zip(outputs, expected, strict=True))
    if wrong:
        found = f"{mode}: {wrong} of {len(outputs)} sequences differ"
        sys.exit(f"{found}; wrong results are not timed")


@contextlib.contextmanager
def stopwatch(model: Model, **methods):
    """Yield the seconds in each method, name -> (object, attribute), while the block runs."""
    seconds = dict.fromkeys(methods, 0.0)

    def timed(name: str, method, *arguments):
        began = now(model)
        result = method(*arguments)
        seconds[name] += now(model) - began
        return result

    for name, (owner, attribute) in methods.items():
        setattr(owner, attribute, functools.partial(timed, name, getattr(owner, attribute)))
    try:
        yield seconds
    finally:
        for owner, attribute in methods.values():
            delattr(owner, attribute)  # uncovers the class's method


# The whole queue


def run_static_batches(model: Model, size: int, prompts: list, params: list) -> list[list[int]]:
    """Run `generate` on static batches, each until its longest sequence is done."""
    outputs = []
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        columns = zip(*generate(model, prompts[batch], params[batch]))
        outputs += [[token for token in column if token is not None] for column in columns]
    return outputs


def engine_with_requests(
    model: Model, batch_size: int, prompts: list, params: list
) -> tuple[Engine, list[Request]]:
    """Return a new engine and its requests for these prompts."""
    engine = Engine(model, max_num_seqs=batch_size, page_size=PAGE)
    return engine, [engine.add(*request) for request in zip(prompts, params)]


def run_engine(model: Model, batch_size: int, prompts: list, params: list) -> list[list[int]]:
    """Generate with a new engine: a used one would find the prompts in its prefix cache."""
    engine, requests = engine_with_requests(model, batch_size, prompts, params)
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


def transformers_engine(model: Model, batch_size: int):
    """Return a function of prompts and params that generates with transformers' engine.

    It uses the manager behind `generate_batch`, which itself takes one length for all requests.
    Prefix sharing is off, because each repeat has the same prompts. The manager's thread lives only
    during a run, because it would slow the others down.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Silence its message about an optional package.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    pages = batch_size * page_count(model.config.block_size, PAGE)
    sizes = {"page_size": PAGE, "num_blocks": pages}
    sizes |= {"max_requests_per_batch": batch_size, "max_batch_tokens": 512}
    plain = {"allow_block_sharing": False, "auto_switch_to_flash": False}
    config = ContinuousBatchingConfig(**sizes, **plain)
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory)
        device = model.device.type
        hf_model = benchmark_kv_cache.load("transformers", directory, model.dtype, device)

    def run(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        settings = GenerationConfig(do_sample=False, eos_token_id=-1)
        manager = hf_model.init_continuous_batching(settings, config)
        manager.start()
        try:
            names = []
            for prompt, wanted in zip(prompts, params):
                length = {"max_new_tokens": wanted.max_new_tokens, "eos_token_id": -1}
                names.append(manager.add_request(prompt, **length))
            found = {}
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


def throughput(benches: list[Bench]) -> None:
    """Run the whole queue one at a time, in static batches, in the engine, and in transformers."""
    args = benches[0].args
    prompts, params = sample_requests(benches[0], args.requests)
    short = [greedy(2)] * len(prompts)  # warm up
    modes = {}
    for bench in benches:
        alone = functools.partial(run_static_batches, bench.model, 1)
        modes[bench.backend, "one at a time", 1] = bench, alone
        for name, function in (("static batches", run_static_batches), ("engine", run_engine)):
            for batch_size in args.batch_size:
                run = functools.partial(function, bench.model, batch_size)
                modes[bench.backend, name, batch_size] = bench, run
    for (_, _, batch_size), (_, run) in modes.items():
        run(prompts[:batch_size], short[:batch_size])
    with_torch = benches[0].backend == "torch"  # transformers is compared with torch only
    if with_torch and importlib.util.find_spec("transformers"):
        try:
            run = transformers_engine(benches[0].model, max(args.batch_size))
            run(prompts[:2], short[:2])
            modes["torch", "transformers", max(args.batch_size)] = benches[0], run
        except Exception as error:  # anything that transformers does not support here
            print(f"without transformers: {type(error).__name__}: {error}", file=sys.stderr)
    elif with_torch:
        print("without transformers: pip install transformers", file=sys.stderr)
    for repeat in range(args.repeats):
        rates = {}
        expected = {}  # backend -> outputs
        for (backend, name, batch_size), (bench, run) in modes.items():
            began = now(bench.model)
            outputs = run(prompts, params)
            rate = sum(map(len, outputs)) / (now(bench.model) - began)
            rates[backend, name, batch_size] = rate
            check(
                f"{name}, {backend}, batch size {batch_size}",
                outputs,
                expected.setdefault(backend, outputs),
            )
            values = {"tokens/s": rate}
            for other in (("one at a time", 1), ("static batches", batch_size)):
                if (backend, *other) in rates:
                    values[f"x {other[0]}"] = rate / rates[backend, *other]
            if backend != "torch" and ("torch", name, batch_size) in rates:
                values["x torch"] = rate / rates["torch", name, batch_size]
            extra_columns = {"library": common.library(name)} if name == "transformers" else {}
            bench.write(name, batch_size, repeat, values, **extra_columns)


# One step, or a few


def overhead(bench: Bench) -> None:
    """Break down the time of a step while all sequences decode."""
    batch_size = max(bench.args.batch_size)
    for repeat in range(bench.args.repeats):
        engine = decoding_engine(bench, batch_size)
        model = engine.model
        methods = {"compute": (engine, "compute"), "scheduling": (engine.scheduler, "schedule")}
        if isinstance(model.runner, NativeRunner):
            passes = {"pass": (model.runner, "forward")}
        else:
            passes = {name: (model, name) for name in ("hidden", "head")}
            methods["cache"] = engine.cache, "prepare"
        with stopwatch(model, **methods, **passes) as seconds:
            times = [time for time, _ in itertools.islice(timed_steps(engine), STEPS)]
        computing = sum(seconds.pop(name) for name in passes)
        # `compute` consists of the pass, preparing the cache, and sampling.
        sampling_seconds = seconds.pop("compute") - computing - seconds.get("cache", 0)
        values = {"step, ms": 1000 * statistics.median(times)}
        values["share of the engine"] = 1 - computing / sum(times)
        seconds["sampling"] = sampling_seconds
        values |= {f"share of {name}": part / sum(times) for name, part in seconds.items()}
        bench.write("engine", batch_size, repeat, values)


def prefix(bench: Bench) -> None:
    """Compare prefix caching with salts that prevent it, on requests with a shared prefix."""
    batch_size = max(bench.args.batch_size)
    ids = range(bench.model.config.vocab_size)
    draw = random.Random(0)
    first = draw.choices(ids, k=bench.args.long_prompt)
    prompts = [first + draw.choices(ids, k=NEW) for _ in range(batch_size)]
    cache_salts = {
        "not shared": [str(seq_index) for seq_index in range(batch_size)],
        "shared": [""] * batch_size,
    }
    for repeat in range(bench.args.repeats):
        baseline = None
        for mode, each in cache_salts.items():
            engine = Engine(bench.model, max_num_seqs=batch_size, page_size=PAGE)
            requests = [
                engine.add(prompt, greedy(NEW), cache_salt)
                for prompt, cache_salt in zip(prompts, each)
            ]
            seconds = run_prefill(engine, requests)
            list(timed_steps(engine))  # finish the requests
            outputs = [request.output for request in requests]
            baseline = baseline or (engine.num_computed_tokens, seconds, outputs)
            check(mode, outputs, baseline[2])
            values = {
                "positions computed": engine.num_computed_tokens,
                "s to all first tokens": seconds,
            }
            values["x fewer positions"] = baseline[0] / engine.num_computed_tokens
            values["x as fast"] = baseline[1] / seconds
            bench.write(mode, batch_size, repeat, values)


def chunks(bench: Bench) -> None:
    """Measure the longest wait for a token of decoding requests when a long prompt arrives."""
    batch_size = bench.args.decode_batch_size
    ids = range(bench.model.config.vocab_size)
    prompt = random.Random(0).choices(ids, k=bench.args.long_prompt)
    for repeat in range(bench.args.repeats):
        for budget, name in (
            (2 * batch_size, "in chunks"),
            (batch_size + len(prompt), "whole prompt"),
        ):
            engine = decoding_engine(
                bench, batch_size, max_num_seqs=batch_size + 1, max_num_batched_tokens=budget
            )
            before = itertools.islice(timed_steps(engine), STEPS // 2)
            plain = statistics.median(seconds for seconds, _ in before)
            arriving = engine.add(prompt, greedy(NEW))
            time = 0.0
            first = None  # time of the arriving prompt's first token
            last = {}  # decoding request -> time of its last token
            gaps = []
            for seconds, events in timed_steps(engine):
                time += seconds
                for request in [event.request for event in events]:
                    if request is arriving:
                        first = first or time
                    else:
                        gaps.append(time - last.get(request, 0.0))
                        last[request] = time
                if arriving.finish_reason:
                    break
            values = {"plain step, ms": 1000 * plain, "longest gap, ms": 1000 * max(gaps)}
            values["x plain step"] = max(gaps) / plain
            values["first token of the prompt, ms"] = 1000 * first
            bench.write(f"budget {budget}, {name}", batch_size, repeat, values)


def queue(bench: Bench) -> None:
    """Time steps with many waiting requests and with none, in turns."""
    batch_size = bench.args.decode_batch_size
    for repeat in range(bench.args.repeats):
        engines = {number: decoding_engine(bench, batch_size) for number in (0, bench.args.waiting)}
        for number, engine in engines.items():
            for _ in range(number):
                engine.add([0], greedy(NEW))
        times = {number: [] for number in engines}
        for _ in range(STEPS):
            for number, engine in engines.items():
                seconds, _ = next(timed_steps(engine))
                times[number].append(seconds)
        for number in engines:
            median = statistics.median(times[number])
            values = {"step, ms": 1000 * median}
            values["x empty queue"] = median / statistics.median(times[0])
            bench.write(f"{number} waiting", batch_size, repeat, values)


def waste(bench: Bench) -> None:
    """Count allocated but unused positions of running requests, over all steps of the queue.

    No time is measured, so it runs once.
    """
    batch_size = max(bench.args.batch_size)
    engine, _ = engine_with_requests(
        bench.model, batch_size, *sample_requests(bench, bench.args.requests)
    )
    unused = {f"pages of {PAGE}": [], "contiguous windows": []}
    paged, whole = unused.values()
    for _ in timed_steps(engine):
        for request in engine.scheduler.running:
            if request.output:  # its prefill is done
                paged.append(len(request.pages) * PAGE - request.num_computed_tokens)
                whole.append(bench.model.config.block_size - request.num_computed_tokens)
    for mode, each in unused.items():
        values = {"unused positions per request, mean": statistics.mean(each)}
        values["unused positions per request, max"] = max(each)
        bench.write(mode, batch_size, 0, values)


def sampling(bench: Bench) -> None:
    """Compare sampling with greedy decoding, in the engine and in `generate`."""
    length = sum(bench.args.new_tokens) // 2
    for repeat in range(bench.args.repeats):
        for batch_size in dict.fromkeys((1, max(bench.args.batch_size))):
            prompts = [[seq_index] for seq_index in range(batch_size)]
            for mode, run in (("engine", engine_steps), ("generate", generate)):
                for sampler, options in SAMPLERS.items():
                    params = []
                    for seq_index in range(batch_size):
                        params.append(
                            SamplingParams(length, ignore_eos=True, seed=seq_index, **options)
                        )
                    times = []
                    began = now(bench.model)
                    for _ in run(bench.model, prompts, params):
                        ended = now(bench.model)
                        times.append(ended - began)
                        began = ended
                    median = statistics.median(times[1:])  # without prefill
                    if sampler == "greedy":
                        baseline = median
                    values = {"tokens/s": batch_size / median}
                    if sampler != "greedy":
                        values["x greedy"] = baseline / median
                    temperature = options.get("temperature", 0.0)
                    bench.write(f"{mode}, {sampler}", batch_size, repeat, values, temperature)


def engine_steps(model: Model, prompts: list, params: list) -> Iterator[list[Event]]:
    """Yield the steps of a new engine whose batch holds all prompts."""
    engine, _ = engine_with_requests(model, len(prompts), prompts, params)
    while engine.busy:
        yield engine.step()


# Drafts


def speculation(bench: Bench) -> None:
    """Compare the engine with drafts to the engine alone, and to a cost model's prediction."""
    args = bench.args
    trials = {}
    length = sum(args.new_tokens) // 2
    prompts = story_prompts(bench, max(args.draft_batch_size))
    context_length = len(prompts[0]) + length // 2  # on average
    name, drafter_class = "draft model", PagedModelDrafter
    if isinstance(bench.draft, DraftHead):
        name, drafter_class = "draft head", PagedHeadDrafter
    for repeat in range(args.repeats):
        for batch_size in args.draft_batch_size:
            single = pass_seconds(bench.model, batch_size, 1, context_length)
            ratio = pass_seconds(bench.model, batch_size, args.gamma + 1, context_length) / single
            values = {
                "pass, ms": 1000 * single,
                f"x with {args.gamma + 1} tokens per sequence": ratio,
            }
            bench.write("passes", batch_size, repeat, values)
            for temperature in args.temperature:
                params = []
                for seq_index in range(batch_size):
                    seed = repeat * batch_size + seq_index
                    params.append(SamplingParams(length, True, temperature, seed=seed))
                # Shared by all repeats, so that only the first begins with trials.
                measured = trials.setdefault((batch_size, temperature), AdaptiveSpeculation())
                drafter = drafter_class(bench.draft, bench.model, batch_size, PAGE)
                modes = {"engine": (None, None), "look-up": (PromptLookupDrafter(), None)}
                modes |= {name: (drafter, None), f"adaptive {name}": (drafter, measured)}
                for mode, (drafter, measured) in modes.items():
                    options = {
                        "drafter": drafter,
                        "gamma": args.gamma,
                        "adaptive_speculation": measured,
                    }
                    engine = Engine(bench.model, max_num_seqs=batch_size, page_size=PAGE, **options)
                    run = decode(engine, prompts[:batch_size], params)
                    if mode == "engine":
                        alone = run
                    if temperature == 0:
                        check(mode, run.outputs, alone.outputs)
                    values = {"tokens/s": run.rate, "tokens per pass": run.tokens_per_pass}
                    if mode != "engine":
                        values["x engine"] = run.rate / alone.rate
                    if measured:
                        values["share of steps with drafts"] = run.steps_with_drafts
                        values |= run.acceptance
                    elif mode != "engine":
                        # A pass with fewer drafts computes fewer positions.
                        wider = 1 + (ratio - 1) * (run.width - 1) / args.gamma
                        gain = run.tokens_per_pass * single / (wider * single + run.drafting)
                        same = sum(
                            output == other for output, other in zip(run.outputs, alone.outputs)
                        )
                        values["positions per pass"] = run.width
                        values["drafting, ms per step"] = 1000 * run.drafting
                        values["x engine, predicted"] = gain
                        values["share of equal outputs"] = same / batch_size
                        values |= run.acceptance
                    bench.write(mode, batch_size, repeat, values, temperature)


def story_prompts(bench: Bench, count: int) -> list[list[int]]:
    """Return beginnings of stories, each continued by sampled tokens so that no two are equal."""
    encoding = load_encoding(bench.args.model, bench.model.config.vocab_size)
    starts = [encoding.encode(text) for text in benchmark_speculative.PROMPTS]
    starts = [starts[seq_index % len(starts)] for seq_index in range(count)]
    drawn = []
    for seq_index in range(count):
        drawn.append(SamplingParams(2 * NEW, ignore_eos=True, temperature=0.8, seed=seq_index))
    outputs = run_engine(bench.model, count, starts, drawn)
    return [start + output for start, output in zip(starts, outputs)]


def decode(engine: Engine, prompts: list, params: list) -> SimpleNamespace:
    """Generate for these prompts, and measure once all requests have their first token."""
    requests = [engine.add(*request) for request in zip(prompts, params)]

    def counts() -> tuple[int, ...]:
        tokens = sum(len(request.output) for request in requests)
        return (
            engine.num_computed_tokens,
            engine.num_draft_tokens,
            engine.num_accepted_tokens,
            tokens,
        )

    run_prefill(engine, requests)
    before = counts()
    methods = {"drafting": (engine.drafter, "propose")} if engine.drafter else {}
    times = []
    passes = 0  # one per sequence and step
    steps_with_drafts = 0  # steps that had drafts
    with stopwatch(engine.model, **methods) as seconds:
        drafted_before = engine.num_draft_tokens
        for time, events in timed_steps(engine):
            times.append(time)
            passes += len(events)
            steps_with_drafts += engine.num_draft_tokens > drafted_before
            drafted_before = engine.num_draft_tokens
    positions, drafted, accepted, tokens = (a - b for a, b in zip(counts(), before))
    return SimpleNamespace(
        outputs=[request.output for request in requests],
        rate=tokens / sum(times),
        tokens_per_pass=tokens / passes,
        width=positions / passes,
        drafting=seconds.get("drafting", 0) / len(times),
        steps_with_drafts=steps_with_drafts / len(times),
        acceptance={"acceptance": accepted / drafted} if drafted else {},
    )


@torch.inference_mode()
def pass_seconds(model: Model, batch_size: int, count: int, context_length: int) -> float:
    """Return median seconds of a pass of `count` tokens per sequence after a cached context."""
    pages = page_count(context_length + count, PAGE)
    cache = PagedCache(model, batch_size * pages, PAGE)
    spans = []
    for seq_index in range(batch_size):
        spans.append(
            Span(
                list(range(seq_index * pages, (seq_index + 1) * pages)), context_length, [0] * count
            )
        )
    times = []
    for _ in range(STEPS // 2):
        began = now(model)
        model.runner.logits(model, cache, spans, [count] * batch_size)
        times.append(now(model) - began)
    return statistics.median(times)


# The whole benchmark

PARTS = {
    part.__name__: part
    for part in (throughput, overhead, sampling, prefix, chunks, queue, waste, speculation)
}


def measure(args, device: str, results: Results) -> None:
    """Run the selected parts. Raises UserError for bad options."""
    for name in ("prompt_tokens", "new_tokens"):
        least, most = getattr(args, name)
        if least > most:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {least} {most}: the minimum must not be above the maximum")
    longest = args.prompt_tokens[1] + max(args.new_tokens[1], STEPS + 2 * NEW)
    common.models_that_fit([args.model], max(longest, args.long_prompt + 2 * NEW))
    speculates = "speculation" in args.only
    for name in (args.model, args.draft):
        if speculates and resolve_source(name).type == "random":
            why = "random models do not agree on drafts; leave out speculation with --only"
            raise UserError(f"{name}: {why}")
    for temperature in args.temperature:
        SamplingParams(temperature=temperature)  # validates it
    benches = []
    for backend in available(args.backend, device):
        model = load(args.model, backend, device)
        draft = None
        if speculates:
            is_head = names_draft_head(args.draft)
            draft = load_head(args.draft, model) if is_head else load(args.draft, backend, device)
        benches.append(Bench(args, backend, model, draft, None))
    environment = common.describe_environment(
        args.model, benches[0].model, device, args.draft if speculates else ""
    )
    results.environment = {name: value for name, value in environment.items() if name in COLUMNS}
    for name, part in PARTS.items():
        if name in args.only:
            each = []
            for bench in benches:
                write = functools.partial(results.write, name, bench.backend)
                each.append(bench._replace(write=write))
            if part is throughput:  # all backends take turns
                part(each)
            else:
                for bench in each:
                    part(bench)


def available(backends: list[str], device: str) -> list[str]:
    """Return the backends that can compute on this device; report the others on stderr.

    Raises UserError if none is left.
    """
    reason = "" if backends == ["torch"] else common.native_refusal(device)
    left_out = [name for name in backends if reason and name != "torch"]
    if left_out == backends:
        raise UserError(f"--backend {' '.join(backends)}: {reason}")
    if left_out:
        print(f"without {', '.join(left_out)}: {reason}", file=sys.stderr)
    return [name for name in backends if name not in left_out]


def load(name: str, backend: str, device: str) -> Model:
    """Return the model as that backend runs it."""
    model = load_model(name, BACKENDS[backend], device)
    if backend != "torch":
        use_native(model)
    return model


PANELS = {  # part -> title, axis label, measures to draw
    "throughput": ("The whole queue", "tokens/s, prefill included", ["tokens/s"]),
    "chunks": ("A long prompt arrives", "ms", ["longest gap, ms", "plain step, ms"]),
    "sampling": ("Sampling", "tokens/s, x greedy", ["x greedy"]),
    "speculation": ("Speculation", "tokens/s, x without drafts", ["x engine"]),
}


def plot(summary):
    """Plot tokens/s by mode, longest gaps and draft speed-ups, in a panel for each part."""
    from matplotlib.figure import Figure

    parts = [part for part in PANELS if part in set(summary["part"])]
    count = max(len(parts), 1)
    bars = summary[summary["measure"].isin(["tokens/s", "x greedy", "x engine"])]
    most = max(bars.groupby(["part", "measure"]).size(), default=0)
    shape = (2, 2) if count > 2 else (1, count)
    size = (8 * shape[1], shape[0] * max(5, 0.16 * most))
    figure = Figure(figsize=size, layout="constrained")
    for axes, part in zip(figure.subplots(*shape, squeeze=False).flat, parts):
        title, label, measures = PANELS[part]
        draw(axes, summary[summary["part"] == part], measures)
        axes.set(title=title, xlabel=label)
    figure.suptitle("The engine, greedy unless a temperature is given: median, min and max")
    return figure


def draw(axes, table, measures: list[str]) -> None:
    """Draw bars of these measures side by side, for each mode that has all of them."""
    setting = ["backend", "mode", "batch_size", "temperature"]
    found = table[table["measure"].isin(measures)]
    found = found.groupby(setting, sort=False).filter(lambda group: len(group) == len(measures))
    settings = list(found.groupby(setting, sort=False).groups)[::-1]  # the first at the top
    for index, measure in enumerate(measures):
        bars = found[found["measure"] == measure].set_index(setting)
        at = [settings.index(key) - 0.4 * index for key in bars.index]
        error = [bars["median"] - bars["min"], bars["max"] - bars["median"]]
        height = 0.8 / len(measures)
        drawn = axes.barh(at, bars["median"], height, xerr=error, capsize=2, label=measure)
        axes.bar_label(drawn, fmt="%.4g", padding=4, fontsize="x-small")
    names = []
    for backend, mode, size, temperature in settings:
        warm = f", temperature {temperature}" if temperature and "temp" not in mode else ""
        names.append(f"{mode}, {backend}, batch size {size}{warm}")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.margins(x=0.12)
    axes.legend(fontsize="x-small")


NUMBERS = {  # option of one number -> default, help
    "--requests": (64, "requests in the queue"),
    "--long-prompt": (200, "tokens of the shared prefix, or of the prompt that arrives"),
    "--decode-batch-size": (16, "sequences that decode in the parts chunks and queue"),
    "--waiting": (10_000, "waiting requests in the part queue"),
}
PAIRS = {  # option of two numbers, min and max -> default, help
    "--prompt-tokens": ([5, 60], "min and max random token ids per prompt"),
    "--new-tokens": ([20, 180], "min and max new tokens per request; EOS is ignored"),
}
LISTS = {  # option of several numbers -> default, help
    "--batch-size": ([8, 32], "sequences per batch, in the engine and in static batches"),
    "--draft-batch-size": ([1, 4, 16], "sequences per batch in the part speculation"),
}


def main(argv=None) -> None:
    descriptions = []
    for name, part in PARTS.items():
        sentence = part.__doc__.partition(".")[0]
        descriptions.append(f"{name}: {sentence[0].lower()}{sentence[1:]}")
    parser = Parser(description=f"Time the engine. {'; '.join(descriptions)}.")
    names = list(PARTS)
    only = {"default": names, "choices": names, "metavar": "PART"}
    parser.add_argument("--only", **common.LIST, **only, help="parts to run")
    parser.add_argument("--model", default=STORIES, help="directory, or model name of infer.py")
    small = STORIES.with_name("stories-draft")
    parser.add_argument(
        "--draft", default=small, help="draft head, or draft model with the same vocabulary"
    )
    pair = {"nargs": 2, "metavar": ("MIN", "MAX")}
    for options, keywords in ((NUMBERS, {}), (PAIRS, pair), (LISTS, common.LIST)):
        for name, (default, what) in options.items():
            number = {"type": common.integer_in_range(1), "default": default}
            parser.add_argument(name, **keywords, **number, help=what)
    gamma = {"type": common.integer_in_range(1, 16), "default": 3}
    parser.add_argument("--gamma", **gamma, help="maximum drafts per sequence and pass, 1 to 16")
    temperature = {"type": float, "default": [0.0, 0.8]}
    parser.add_argument(
        "--temperature", **common.LIST, **temperature, help="temperatures of the part speculation"
    )
    computes = {"choices": BACKENDS, "default": list(BACKENDS)}
    parser.add_argument("--backend", **common.LIST, **computes, help="compute backends")
    shared = {"lengths": None, "repeats": 2, "dtypes": False, "columns": COLUMNS}
    common.add_options(parser, "engine_cpu.csv", **shared)
    common.run_benchmark(parser, measure, None, plot, argv, Results)


if __name__ == "__main__":
    main()
