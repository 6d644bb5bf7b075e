"""Engine options of the command line, and an engine from them."""

import contextlib
import functools
from collections.abc import Iterator

from adapters import Adapters
from command_line.models import load_head, load_models, names_draft_head, pick_device
from command_line.options import CACHE_DTYPES, check_utf8
from command_line.parser import Parser, is_distributed
from command_line.prefix_cache import (
    add_prefix_cache_options,
    check_prefix_cache_options,
    open_prefix_files,
)
from draft_head import DraftHead
from engine.config import EngineConfig
from engine.drafter import (
    AdaptiveSpeculation,
    Drafter,
    PagedHeadDrafter,
    PagedModelDrafter,
    PromptLookupDrafter,
)
from engine.engine import Engine
from errors import UserError
from loading.load import Source, empty_model, resolve_source
from loading.lora import read_adapter
from model import Model
from parallel.ranks import PARALLEL_MODES, TensorParallelGroup
from parallel.shards import load_shard, parallelize_vocabulary
from text.tokenizer import load_encoding


def add_engine_options(parser: Parser) -> None:
    """Add the engine options to a parser, except the model's and --stride."""
    group = parser.group("engine")
    seqs_help = "maximum number of sequences per step"
    group.add_argument("--max-num-seqs", metavar="N", type=int, default=32, help=seqs_help)
    pages_help = "KV cache pages (default: max-num-seqs contexts, up to 65,536 float32 positions)"
    group.add_argument("--num-pages", metavar="N", type=int, help=pages_help)
    page_help = "positions per page"
    group.add_argument("--page-size", metavar="N", type=int, default=16, help=page_help)
    tokens_help = "maximum number of tokens per step"
    group.add_argument(
        "--max-num-batched-tokens", metavar="N", type=int, default=512, help=tokens_help
    )
    join_help = "collective of tensor parallelism: all-gather is bit-exact, all-reduce sends less"
    group.add_argument("--join", default="gather", choices=PARALLEL_MODES, help=join_help)
    adapters_help = "LoRA adapters that requests may select by name; repeatable"
    options = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME=DIR"}
    group.add_argument("--lora-modules", **options, help=adapters_help)
    add_prefix_cache_options(parser)
    group = parser.group("speculation")
    draft_help = "draft head, or draft model with the same vocabulary; lookup: prompt lookup"
    group.add_argument("--draft", metavar="MODEL", help=draft_help)
    gamma_help = (
        "maximum draft tokens per sequence and step, 1 to 16 (default: 3, or 0 if that is faster)"
    )
    group.add_argument("--gamma", metavar="N", type=int, help=gamma_help)


def check_engine_options(args) -> None:
    """Raise UserError for engine options that are invalid or cannot be combined."""
    if args.gamma is not None and args.draft is None:
        raise UserError("--gamma requires --draft")
    parse_adapters(args.lora_modules)
    check_prefix_cache_options(args)


def parse_adapters(given: list[str]) -> dict[str, str]:
    """Parse NAME=DIR arguments into adapter name -> directory.

    Raises UserError for any other syntax, or a duplicate name.
    """
    directories = {}
    for each in given:
        check_utf8("--lora-modules", each)
        name, _, directory = each.partition("=")
        if not name or not directory:
            raise UserError(f"--lora-modules {each}: must be NAME=DIR")
        if name in directories:
            raise UserError(f"--lora-modules {each}: name {name} occurs twice")
        directories[name] = directory
    return directories


def load_adapters(model: Model, directories: dict[str, str]) -> None:
    """Load unmerged adapters into a model. directories: adapter name -> directory.

    Raises UserError as `read_adapter` does, and for layers whose adapters must be merged.
    """
    empty = empty_model(model.config)
    lora_weights = {name: read_adapter(directory, empty) for name, directory in directories.items()}
    if lora_weights:
        model.adapters = Adapters(model, lora_weights)


def load_engine(
    args, source: Source, device: str, tp_group: TensorParallelGroup | None = None
) -> Engine:
    """Load the engine of a command line with its models, adapters and encoding.

    On a rank above 0 only its model and cache are used. Raises UserError for bad options or files.
    """
    is_driver = tp_group is None or tp_group.rank == 0
    directories = parse_adapters(args.lora_modules)
    if tp_group and directories:  # before any rank loads, so that only the driver fails
        raise UserError("--lora-modules requires a single process; with several use --adapter")
    if tp_group and args.prefix_cache is not None:
        raise UserError("--prefix-cache requires a single process")
    has_head = names_draft_head(args.draft)
    if tp_group and has_head:
        raise UserError(f"--draft {args.draft}: a draft head requires a single process")
    if tp_group and is_driver:
        tp_group.broadcast()  # start loading on the workers
    has_draft = is_driver and args.draft not in (None, "lookup") and not has_head
    names = [source, args.draft] if has_draft else [source]
    load_first = functools.partial(load_shard, tp_group=tp_group) if tp_group else None
    model, *drafts = load_models(names, args, device, load_first)
    load_adapters(model, directories)
    if has_head:
        drafts = [load_head(args.draft, model)]
    if tp_group:
        parallelize_vocabulary(model)
        tp_group.barrier()
    config = engine_config(args)
    return Engine(
        model,
        config,
        make_drafter(config, args.draft, model, drafts),
        adaptive_speculation=AdaptiveSpeculation() if args.gamma is None else None,
        encoding=load_encoding(source, model.config.vocab_size),
        prefix_files=open_prefix_files(args, model),
    )


def engine_config(args) -> EngineConfig:
    """Return the engine settings of a command line. Raises UserError for a value out of range."""
    names = "max_num_seqs", "num_pages", "page_size", "max_num_batched_tokens", "stride"
    return EngineConfig(
        **{name: getattr(args, name) for name in names},
        gamma=EngineConfig.gamma if args.gamma is None else args.gamma,
        cache_dtype=CACHE_DTYPES[args.cache_dtype],
    )


def make_drafter(
    config: EngineConfig, name: str | None, model: Model, drafts: list[Model]
) -> Drafter | None:
    """Return the drafter that --draft names. drafts: the draft model or head, or empty."""
    if drafts:
        drafter = PagedHeadDrafter if isinstance(drafts[0], DraftHead) else PagedModelDrafter
        return drafter(drafts[0], model, config.max_num_seqs, config.page_size, config.cache_dtype)
    return PromptLookupDrafter() if name else None


@contextlib.contextmanager
def driver_group(args) -> Iterator[TensorParallelGroup | None]:
    """Yield the tensor-parallel group that torchrun started, for a block that only rank 0 runs.

    Yields None without torchrun. The workers exit at the end of the block.
    """
    if not is_distributed():
        yield None
        return
    with TensorParallelGroup(args.join) as tp_group:
        device = pick_device(args.device)
        if device != "cpu":
            raise UserError(f"several processes require --device cpu, not {device}")
        yield tp_group
        tp_group.broadcast()


def run_worker(args) -> None:
    """Run a worker, a rank above 0, until the `driver_group` block of rank 0 ends."""
    with TensorParallelGroup(args.join) as tp_group:
        tp_group.broadcast()  # wait until rank 0 has checked the options, so that it reports errors
        engine = load_engine(args, resolve_source(args.model), "cpu", tp_group)
        engine.model.runner.run_worker_loop(engine.model, engine.cache)
