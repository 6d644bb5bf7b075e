"""Generate text: python infer.py --prompt "Once upon a time"."""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from cache import KVCache, check_stride, window_start
from chat import Chat
from checkpoint import UserError, memory_for
from engine.drafter import LookupDrafter, ModelDrafter
from engine.engine import Engine
from engine.request import Request
from load import load_model
from model import Model, causal_attention
from native import BuildError, kernel, use_native
from native.step import MOST_TOKENS
from sampling import NOT_FINITE, SamplingParams, check_limits, choose, params_of_each
from tokenizer import TextStream, load_encoding

STORIES = Path(__file__).resolve().parent / "checkpoints" / "stories"


@torch.inference_mode()
def generate(
    model: Model,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stride: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue all prompts together, one token each a step.

    prompts: token ids, one list a prompt, of any lengths; an empty prompt starts from the EOS token.
    params: for all prompts, or one for each.
    generator: of the random numbers for rows without a seed, on the model's device; torch's global one if None.
    use_cache: keep the keys and values of past positions; without, each step computes all of them again.
    stride: how far the window moves when the text has outgrown it, from 1 to block_size; None for half of that.
    Yields, at most `max_new_tokens` times, the next token of each prompt, EOS included, and None after its last one.
    Greedy or with a seed, a row has the text of its own run, but for rounding; without one it depends on its batch,
    which shares the generator.
    Raises UserError if there is no prompt, stride is out of range, the cache does not fit in memory, or the logits are
    not finite, ValueError if params are not as many as prompts.
    """
    sequences = [list(prompt) or [model.config.bos_token_id] for prompt in prompts]
    if not sequences:
        raise UserError("at least one prompt is needed")
    each = params_of_each(params, len(sequences))
    block_size = model.config.block_size
    stride = check_stride(stride, block_size)
    lengths = [len(sequence) + its.max_new_tokens for sequence, its in zip(sequences, each)]
    # The last token is not passed, but a prompt is, also for a row that wants no token.
    longest = max(max(len(sequence), length - 1) for sequence, length in zip(sequences, lengths))
    cache = KVCache(model, len(sequences), min(longest, block_size)) if use_cache else None
    finished = [its.max_new_tokens == 0 for its in each]
    prompt_lengths = [len(sequence) for sequence in sequences]
    while not all(finished):
        windows = [sequence[window_start(len(sequence), block_size, stride) :] for sequence in sequences]
        logits = next_logits(model, windows, cache)[:, 0]
        next_tokens = choose(logits, each, sequences, prompt_lengths, generator)
        step = [None if done else token for done, token in zip(finished, next_tokens)]
        yield step
        for row, (token, sequence, its) in enumerate(zip(step, sequences, each)):
            # Only a token that was generated ends a text: a prompt may well end in EOS.
            if token in model.config.eos_token_ids and not its.ignore_eos or len(sequence) + 1 == lengths[row]:
                finished[row] = True
            if not finished[row]:  # a finished row passes the token before its last one again
                sequence.append(token)


class Beam(NamedTuple):
    """A text that beam search has found."""

    tokens: list[int]  # generated ones, EOS included
    score: float  # the sum of their log-probabilities / len(tokens) ** length_penalty


@torch.inference_mode()
def beam_search(
    model: Model,
    prompt: list[int],
    num_beams: int,
    max_new_tokens: int = 220,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
    use_cache: bool = True,
    stride: int | None = None,
) -> list[Beam]:
    """Search for probable continuations of a prompt: in each step, of all texts longer by one token, keep the best.

    num_beams: how many to keep, 1 to 65536. length_penalty: -10 to 10; above 0 favours long texts, below 0 short ones.
    The other arguments are those of `generate`.
    Returns at most num_beams finished texts, best first: they end in EOS or have max_new_tokens, of which 0 finds none.
    Ends when no running text can get among them any more, as transformers does with early_stopping="never".
    Raises UserError for a value out of range, and where `generate` does.
    """
    SamplingParams(max_new_tokens, ignore_eos)  # checks them
    check_limits(num_beams=num_beams, length_penalty=length_penalty)
    prompt, block_size = list(prompt) or [model.config.bos_token_id], model.config.block_size
    stride, ends = check_stride(stride, block_size), () if ignore_eos else model.config.eos_token_ids
    cache = KVCache(model, 1, min(len(prompt) + max_new_tokens - 1, block_size)) if use_cache else None
    running, finished = [Beam([], 0.0)], []  # the score of a running text is its sum of log-probabilities
    for length in range(1, max_new_tokens + 1):
        start = window_start(len(prompt) + length - 1, block_size, stride)
        logits = next_logits(model, [(prompt + tokens)[start:] for tokens, _ in running], cache)[:, 0]
        # float64, because many terms are added; on the CPU, because MPS has no float64.
        sums = torch.tensor([score for _, score in running], dtype=torch.float64)[:, None]
        sums = (sums + logits.cpu().double().log_softmax(dim=-1)).flatten()  # (running * vocab_size)
        # So many that num_beams can go on even if each row has all its EOS tokens among them.
        best = sums.topk(min(num_beams * (1 + len(ends)), len(sums)))
        parents, candidates = [], []
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            row, token = divmod(index, logits.shape[-1])
            tokens = running[row].tokens + [token]
            if token not in ends and length < max_new_tokens:
                parents.append(row)
                candidates.append(Beam(tokens, total))
            elif rank < num_beams:  # the candidates after these are there to go on, not to end
                finished.append(Beam(tokens, total / length**length_penalty))
        running, parents = candidates[:num_beams], parents[:num_beams]
        finished = sorted(finished, key=lambda beam: beam.score, reverse=True)[:num_beams]
        # A sum can only fall. Its best divisor is that of the longest text, or with a penalty below 0 of the next one.
        best_length = max_new_tokens if length_penalty > 0 else length + 1
        full = len(finished) == num_beams
        if not running or (full and running[0].score / best_length**length_penalty <= finished[-1].score):
            break
        if cache:
            cache.select(parents)
    return finished


@torch.inference_mode()
def next_logits(model: Model, windows: list[list[int]], cache: KVCache | None, keep: int = 1) -> torch.Tensor:
    """The logits at the last `keep` positions of each window, (B, keep, vocab_size), float32 whatever the weights are.

    The cache, None for none, saves computing what its rows share with the windows.
    Raises UserError if the logits are not finite, ValueError if a window is shorter than keep.
    """
    if min(len(window) for window in windows) < keep:
        raise ValueError(f"a window is shorter than the {keep} positions to keep")
    known = [0] * len(windows) if cache is None else cache.match(windows, keep)
    new = [window[length:] for window, length in zip(windows, known)]
    # A row with many new tokens, a prompt or a window that hopped, does not make the others as long as itself.
    decode = [row for row, tokens in enumerate(new) if len(tokens) == keep]
    prefill = [row for row, tokens in enumerate(new) if len(tokens) > keep]
    parts = [pass_logits(model, [new[row] for row in rows], rows, cache, keep) for rows in (decode, prefill) if rows]
    logits = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(decode + prefill).argsort()]
    if not logits.isfinite().all():
        raise UserError(NOT_FINITE)
    return logits


def pass_logits(model: Model, new: list[list[int]], rows: list[int], cache: KVCache | None, keep: int) -> torch.Tensor:
    """The logits at the last `keep` new tokens of these rows, from one pass, padded right: (B, keep, vocab_size)."""
    lengths = [len(tokens) for tokens in new]
    if cache is not None and model.native and sum(lengths) <= MOST_TOKENS:
        return model.native.logits(new, rows, cache, keep)
    T = max(lengths)
    tokens = torch.tensor([tokens + tokens[-1:] * (T - len(tokens)) for tokens in new], device=model.device)  # (B, T)
    if cache is None:
        x = model.hidden(tokens, torch.arange(T, device=model.device), causal_attention)
    else:
        x = model.hidden(tokens, cache.extend(new, rows), cache.attend)
    if min(lengths) == T:
        return model.head(x[:, -keep:]).float()
    rows, last = torch.arange(len(new))[:, None], torch.tensor(lengths)[:, None] + torch.arange(-keep, 0)  # (B, keep)
    return model.head(x[rows, last]).float()


def pick_device(name: str) -> str:
    """The device to run on; `auto` is the first of cuda, mps, cpu that this machine has, any other name is kept.

    Raises UserError for a device that this machine lacks.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in available:
        raise UserError(f"--device {name}: not on this machine, which has {', '.join(available)}")
    return name


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype of that name. Raises UserError if the device cannot multiply matrices of it."""
    dtype = DTYPES[name]
    if dtype == torch.int8:
        return dtype  # of the weights only: products are computed in float32
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        raise UserError(f"--dtype {name}: {device} does not compute in it; float32 works everywhere") from None
    return dtype


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options on what to write, and on where and how to run."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--prompt", action="append", help="text to continue, repeatable; empty: a text of its own")
    parser.add_argument("--prompt-file", type=Path, help="UTF-8 file with one more prompt in each line")
    parser.add_argument("--max-new-tokens", type=int, help="length limit, in tokens")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--temperature", type=float, help="0: greedy; below 1: safer; above 1: more surprising")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens; 0: from all")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens with this mass; 1: from all")
    parser.add_argument("--presence-penalty", type=float, help="against tokens in the output; -2 to 2")
    parser.add_argument("--frequency-penalty", type=float, help="the same for each occurrence; -2 to 2")
    parser.add_argument("--repetition-penalty", type=float, help="against tokens in prompt and output; 1: off")
    parser.add_argument("--stride", type=int, help="how far a full window moves; half its length if not given")
    parser.add_argument("--seed", type=int, help="the same seed, the same text; a new one if not given")
    parser.add_argument("--num-samples", type=int, default=1, help="how many texts to generate for each prompt")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"), help="where to run")
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="of weights and activations; int8: weights only"
    )
    parser.add_argument("--backend", default="torch", choices=("torch", "native"), help="native: C code for this CPU")
    parser.set_defaults(**dataclasses.asdict(SamplingParams()))


def load_models(names: list, args, device: str) -> list[Model]:
    """The models of a command line, in its dtype and with its backend. A note says if there is no native code.

    Raises UserError for a model that cannot be loaded, or a dtype and a device that do not go together.
    """
    dtype = pick_dtype(args.dtype, device)
    if args.backend == "native" and (device != "cpu" or args.dtype not in ("float32", "int8")):
        allowed = "--device cpu and --dtype float32 or int8"
        raise UserError(f"--backend native is for {allowed}; not {device} and {args.dtype}")
    models = [load_model(name, dtype, device) for name in names]
    if args.backend == "native":
        try:
            for model in models:
                use_native(model)
            if "plain C" in kernel() or "one thread" in kernel():
                print(f"note: --backend native: without what makes it fast: {kernel()}", file=sys.stderr)
        except BuildError as error:
            print(f"note: --backend native: {error}; torch computes instead", file=sys.stderr)
    return models


def sampling_params(args) -> SamplingParams:
    """The SamplingParams of a command line. A note on stderr names options that do nothing at temperature 0."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "seed"]
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    given = {"--seed": args.seed is not None, "--num-samples": args.num_samples > 1}
    given |= {"--top-k": params.top_k > 0, "--top-p": params.top_p < 1}
    if params.temperature == 0 and any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        print(f"note: temperature 0 is greedy, so this changes nothing: {names}", file=sys.stderr)
    return params


def seeded_generator(seed: int | None, device: str) -> torch.Generator:
    """A generator with that seed, or with a new one for None. Raises UserError for a seed out of range."""
    if seed is not None and not 0 <= seed < 2**64:
        raise UserError(f"--seed {seed}: it must be an integer from 0 to 2**64 - 1")
    generator = torch.Generator(device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator


MOST_TEXTS = 2**16  # a limit, because lists for 10**9 of them fill the memory before any tensor is made


def read_prompts(args) -> list[str]:
    """The prompts of a command line, then the lines of its file that are not empty, --num-samples times each.

    Without any, an empty one. Raises UserError for too many, one not UTF-8, or a file that is missing or empty.
    """
    prompts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text("utf-8-sig").split("\n")
        except OSError as error:
            raise UserError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"--prompt-file {args.prompt_file}: not UTF-8 text") from None
        if not any(lines):
            raise UserError(f"--prompt-file {args.prompt_file}: empty; one prompt in each line is needed")
        prompts += [line for line in lines if line]
    prompts = prompts or [""]
    for prompt in prompts:
        check_text("--prompt", prompt)
    if args.num_samples < 1:
        raise UserError(f"--num-samples {args.num_samples}: it must be an integer >= 1")
    if len(prompts) * args.num_samples > MOST_TEXTS:
        raise UserError(
            f"{len(prompts)} prompts x --num-samples {args.num_samples}: at most {MOST_TEXTS} texts at once"
        )
    return [prompt for prompt in prompts for _ in range(args.num_samples)]


def check_text(name: str, text: str) -> None:
    """Raise UserError for a text that is not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):  # Python's stand-in for a stray byte
        raise UserError(f"{name} {text!a}: not UTF-8 text")


class Output:
    """Prompts and their texts on stdout: a single one as it comes, several whole and in order at the end.

    skip: tokens that print nothing, those that end a text. seed: of the draws, None if there are none.
    Use it as a context manager. However the block ends, what was generated is printed, then statistics on stderr.
    """

    def __init__(self, prompts: list[str], encoding, skip: tuple[int, ...] = (), seed: int | None = None):
        self.texts, self.shown, self.seed = list(prompts), 0, seed
        self.streams = [TextStream(encoding, skip) for _ in prompts]
        self.count, self.times = 0, [time.perf_counter()]

    def add(self, row: int, token: int) -> None:
        """Put a token at the end of a row's text."""
        self.add_text(row, self.streams[row].add(token), 1)

    def add_text(self, row: int, text: str, count: int) -> None:
        """Put a text of so many tokens at the end of a row's text."""
        self.texts[row] += text
        self.count += count

    def end_step(self) -> None:
        """Take the time, and print what is new if there is one text only."""
        self.times.append(time.perf_counter())
        if len(self.texts) == 1:
            print(self.texts[0][self.shown :], end="", flush=True)
            self.shown = len(self.texts[0])

    def __enter__(self):
        return self

    def __exit__(self, error_type, *_):
        if error_type is not None and not self.times[1:]:
            return  # an error before the first token
        texts = [text + stream.end() for text, stream in zip(self.texts, self.streams)]
        print(("\n" + "-" * 40 + "\n").join(texts)[self.shown :], flush=True)  # before anything goes to stderr
        if self.times[1:]:
            print(self.statistics(), file=sys.stderr)

    def statistics(self) -> str:
        """The speed of the run, and the seed of its draws."""
        first, total = self.times[1] - self.times[0], self.times[-1] - self.times[0]
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.count} tokens, {self.count / total:.1f} tokens/s, the first after {first:.3f} s{seed}"


def run_script(parser: argparse.ArgumentParser, action, argv=None) -> None:
    """Parse a command line and call action(args). What a user can put right is one line on stderr and exit code 2.

    After Ctrl-C the exit code is 130. When nobody reads the output any more, it ends quietly.
    """
    args = parser.parse_args(argv)
    try:
        with memory_for("the model and its texts"):
            action(args)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        sys.exit(141)  # as a program that SIGPIPE ended


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2, a Llama or a Qwen2.5.")
    parser.add_argument("--model", default=STORIES, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ...")
    parser.add_argument("--no-cache", action="store_true", help="compute all positions again in each step")
    parser.add_argument("--num-beams", type=int, help="search for a probable text, keeping that many in each step")
    parser.add_argument("--length-penalty", type=float, help="for --num-beams; below 0: shorter; 1 if not given")
    chat_help = "prompts are messages to a chat model, and its replies are shown; without any, talk: a message a line"
    parser.add_argument("--chat", action="store_true", help=chat_help)
    parser.add_argument("--system", help="for --chat: what the model is told before the first message")
    parser.add_argument("--engine", action="store_true", help="prompts join a running batch as others leave it")
    parser.add_argument("--max-rows", type=int, help="for --engine: how many texts run at once; 32 if not given")
    parser.add_argument("--num-pages", type=int, help="for --engine: pages in the cache; max-rows windows if not given")
    parser.add_argument("--page-size", type=int, help="for --engine: positions in a page; 16 if not given")
    parser.add_argument("--budget", type=int, help="for --engine: tokens in one step; 512 if not given")
    parser.add_argument("--draft", help="for --engine: a smaller model of the same vocabulary drafts; or lookup")
    parser.add_argument("--gamma", type=int, help="for --draft: how many tokens to draft for a step; 3 if not given")
    parser.add_argument("--stop", action="append", help="for --engine: a text ends before this one; repeatable")
    parser.add_argument("--logprobs", type=int, help="for --engine: show log-probabilities, with so many of the best")
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr. Raises UserError for bad input."""
    check_beam_options(args)
    check_chat_options(args)
    check_engine_options(args)
    params, prompts = sampling_params(args), read_prompts(args)
    device = pick_device(args.device)
    first_seed = seeded_generator(args.seed, device).initial_seed()
    chat = Chat(args.model) if args.chat else None
    model, *drafts = load_models([args.model] + [args.draft] * (args.draft not in (None, "lookup")), args, device)
    encoding = load_encoding(args.model, model.config.vocab_size)
    skip = () if params.ignore_eos else model.config.eos_token_ids
    engine = make_engine(args, model, drafts, encoding) if args.engine else None

    def write(tokens: list[list[int]], shown: list[str]) -> list[str]:
        output = Output(shown, encoding, skip, first_seed if params.temperature else None)
        if args.num_beams is not None:
            print_beams(args, model, tokens, output)
            return output.texts
        seeds = [(first_seed + row) % 2**64 for row in range(len(tokens))]  # each text one of its own
        each = [dataclasses.replace(params, seed=seed) for seed in seeds]
        if engine:
            run_engine(engine, tokens, each, args.stop or [], args.logprobs, output)
            return output.texts
        with output:
            for step in generate(model, tokens, each, None, not args.no_cache, args.stride):
                for row, token in enumerate(step):
                    if token is not None:
                        output.add(row, token)
                output.end_step()
        return output.texts

    if chat is None:
        write([encoding.encode(prompt, allowed_special="all") for prompt in prompts], prompts)
        return
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    if is_conversation(args):
        converse(chat, encoding, system, model.config.block_size - params.max_new_tokens, write)
        return
    asked = [system + [{"role": "user", "content": prompt}] for prompt in prompts]
    write([chat.encode(messages, encoding) for messages in asked], [""] * len(asked))  # the reply alone is shown


def check_beam_options(args) -> None:
    """Raise UserError for options that do not go together with or without --num-beams."""
    if args.num_beams is None:
        if args.length_penalty is not None:
            raise UserError("--length-penalty is for --num-beams only")
        return
    off = dataclasses.asdict(SamplingParams(args.max_new_tokens, args.ignore_eos)) | {"num_samples": 1, "seed": None}
    refused = ["--" + name.replace("_", "-") for name, value in off.items() if getattr(args, name) != value]
    if refused:
        raise UserError(f"--num-beams neither draws nor penalises tokens; leave out {', '.join(refused)}")


def check_chat_options(args) -> None:
    """Raise UserError for options that do not go together with or without --chat."""
    if args.system is not None and not args.chat:
        raise UserError("--system is for --chat only")
    check_text("--system", args.system or "")
    if is_conversation(args) and args.num_samples > 1:
        raise UserError("--num-samples is for --prompt and --prompt-file; a conversation goes on from one reply")


ENGINE_OPTIONS = ("max_rows", "num_pages", "page_size", "budget", "gamma")


def engine_options(args) -> dict[str, int]:
    """The arguments of Engine that are given on a command line."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}


def check_engine_options(args) -> None:
    """Raise UserError for options that do not go together with or without --engine."""
    if args.gamma is not None and args.draft is None:
        raise UserError("--gamma is for --draft only")
    others = [name for name in ("draft", "stop", "logprobs") if getattr(args, name) is not None]
    given = [*engine_options(args), *others]
    if given and not args.engine:
        raise UserError(f"--{given[0].replace('_', '-')} is for --engine only")
    for text in args.stop or []:
        check_text("--stop", text)
    unable = {"--num-beams": args.num_beams is not None, "--no-cache": args.no_cache}
    unable["--backend native"] = args.backend == "native"
    if args.engine and any(unable.values()):
        raise UserError(f"--engine does not do this; leave out {', '.join(name for name in unable if unable[name])}")


def make_engine(args, model: Model, drafts: list[Model], encoding) -> Engine:
    """The engine that a command line describes. drafts: the draft model, if there is one."""
    options, drafter = engine_options(args), LookupDrafter() if args.draft else None
    if drafts:
        sizes = {name: value for name, value in options.items() if name in ("max_rows", "page_size")}
        drafter = ModelDrafter(drafts[0], model, **sizes)
    return Engine(model, stride=args.stride, drafter=drafter, encoding=encoding, **options)


def run_engine(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], stop, logprobs, output: Output
) -> None:
    """Write the texts of these prompts, up to a stop string. Raises UserError for one that failed, after all others."""
    with output:
        pairs = enumerate(zip(prompts, params))
        rows = {engine.add(tokens, its, stop=stop, logprobs=logprobs): row for row, (tokens, its) in pairs}
        errors, shown = [], list(output.texts)
        try:
            while engine.busy:
                events = engine.step()
                for event in events:
                    output.add_text(rows[event.request], event.text, len(event.tokens))
                    if event.error:
                        errors.append(f"text {rows[event.request] + 1}: {event.error}")
                if any(event.tokens for event in events):  # not after a chunk: it would count as the first token
                    output.end_step()
        finally:  # after Ctrl-C there is text that no event brought, and text that is held back
            for request, row in rows.items():
                output.texts[row] = shown[row] + request.text + request.stream.end()
    scheduler = engine.scheduler
    computed = f"{engine.steps} steps, {engine.positions} positions computed, {scheduler.shared} shared"
    drafts = f", {engine.accepted} of {engine.drafted} drafts accepted" if engine.drafter else ""
    print(f"{computed}, {scheduler.preemptions} preemptions{drafts}", file=sys.stderr)
    if logprobs is not None:
        print_logprobs(engine.encoding, list(rows))
    if errors:
        raise UserError("; ".join(errors))


def print_logprobs(encoding, requests: list[Request]) -> None:
    """Each token of these texts on stderr, with its log-probability, then those of the most likely tokens there."""

    def quoted(token: int) -> str:
        try:
            data = encoding.decode_single_token_bytes(token)
            return repr(data.decode())
        except KeyError:
            return f"id {token}"  # a padded vocabulary has ids without text
        except UnicodeDecodeError:
            return repr(data)  # a part of a character

    for number, request in enumerate(requests, 1):
        if len(requests) > 1:
            print(f"text {number}", file=sys.stderr)
        for token, (logprob, top) in zip(request.output, request.logprobs):
            others = "".join(f"  {quoted(other)} {value:.3f}" for other, value in top)
            print(f"{logprob:8.3f}  {quoted(token):12}{others}".rstrip(), file=sys.stderr)


def is_conversation(args) -> bool:
    """Whether messages come from standard input."""
    return args.chat and args.prompt is None and args.prompt_file is None


def converse(chat: Chat, encoding, system: list[dict[str, str]], room: int, write) -> None:
    """Reply to each line of standard input, after the system message if there is one, and all that was said before.

    write: prompts, and what to show before the texts, to texts, as in `run`. Where more than `room` tokens were said,
    the oldest messages are left out, each with its reply: the window of `generate` would move past the system message
    first, and begin inside another one. A last message that is longer alone is left to it.
    """
    said = []
    for line in read_lines():
        said.append({"role": "user", "content": line})
        tokens, left_out = chat.encode(system + said, encoding), 0
        while len(tokens) > room and len(said) > 1:
            del said[:2]
            tokens, left_out = chat.encode(system + said, encoding), left_out + 2
        if left_out:
            full = f"the window is full: the {left_out} oldest messages are left out"
            print(f"note: {full}; a smaller --max-new-tokens leaves more room", file=sys.stderr)
        (reply,) = write([tokens], [""])
        said.append({"role": "assistant", "content": reply})


def read_lines() -> Iterator[str]:
    """The lines of standard input, but for empty ones; where somebody types them, after a sign on stderr."""
    if sys.stdin is None:
        raise UserError("standard input is closed, and there is no --prompt")
    typed, first = sys.stdin.isatty(), True
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            if typed:
                print(file=sys.stderr)
            return
        try:
            text = line.decode("utf-8-sig" if first else "utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise UserError("standard input: not UTF-8 text") from None
        first = False
        if text:
            yield text


def print_beams(args, model: Model, prompts: list[list[int]], output: Output) -> None:
    """Search for each prompt by itself: the best text to stdout, how it scored to stderr."""
    penalty, found = 1.0 if args.length_penalty is None else args.length_penalty, []
    options = args.num_beams, args.max_new_tokens, penalty, args.ignore_eos, not args.no_cache, args.stride
    with output:
        for row, prompt in enumerate(prompts):
            beams = beam_search(model, prompt, *options)
            for tokens, score in beams[:1]:
                for token in tokens:
                    output.add(row, token)
                output.end_step()
                total = f"sum of log-probabilities {score * len(tokens) ** penalty:.6g}, {len(tokens)} tokens"
                found.append(f"score {score:.6g}, {total}, the best of {len(beams)} texts")
    for line in found:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
