"""Serve a model with several engines on Ray, each in its own process: python serve_ray.py."""

import contextlib
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from cache import ContextWindow
from command_line.chat import print_sampling_defaults
from command_line.models import pick_device
from command_line.options import check_option_limits
from command_line.parser import Parser, run_script, write_stdout
from engine.options import engine_config, load_adapters, parse_adapters
from errors import UserError
from loading.load import empty_model, load_config, resolve_source
from loading.lora import read_adapter
from serve import add_server_options, check_server_options, listen, server_url
from server.replicas import Ingress, Replica
from server.served import budget_defaults, find_chat, served_name, server_defaults
from text.tokenizer import load_encoding

SECONDS = (int | float, lambda value: 1 <= value < 1e6, "a number from 1 to below 1000000")
CPUS = (int | float, lambda value: 1e-4 <= value < 1e6, "a number from 0.0001 to below 1000000")
LIMITS = {
    "--replicas": (int, lambda value: value >= 1, "an integer >= 1"),
    "--cpus": CPUS,  # Ray's minimum is 0.0001
    "--scale-seconds": SECONDS,
}
MAX_ONGOING_REQUESTS = 2**20  # concurrent requests; an engine enforces its own limit
RAY_ENVIRONMENT = {  # Ray reads these at import
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # calls by gRPC, and fewer threads
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # no additional port
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # allow Windows and macOS
}


def main(argv=None) -> None:
    run_script(make_parser(), run, argv)


def make_parser() -> Parser:
    parser = Parser(description="Serve a model with several engines, each in a process of Ray.")
    ray = parser.group("replicas")
    ray.add_argument("--replicas", metavar="N", type=int, default=2, help="number of engines")
    max_help = "maximum number of engines under load (default: --replicas)"
    ray.add_argument("--max-replicas", metavar="N", type=int, help=max_help)
    scale_help = "seconds of more or less load before --max-replicas adds or removes an engine"
    ray.add_argument("--scale-seconds", metavar="S", type=float, default=30, help=scale_help)
    ray.add_argument(
        "--cpus", metavar="N", type=float, default=1, help="CPUs reserved for each engine"
    )
    routing_help = "prefix: prefer the engine that caches a prompt's prefix; load: the least loaded"
    ray.add_argument("--routing", default="prefix", choices=("prefix", "load"), help=routing_help)
    add_server_options(parser)
    return parser


def run(args) -> None:
    """Serve until a signal comes. Raises UserError for bad input, or if Ray itself ends."""
    check_options(args)
    option = "--replicas" if args.max_replicas is None else "--max-replicas"
    requested = f"{option} {max_replicas(args)}"
    cpus = os.cpu_count()
    if max_replicas(args) * args.cpus > cpus:
        raise UserError(f"{requested} --cpus {args.cpus:g}: this machine has {cpus} CPUs")
    gpus = torch.cuda.device_count()
    if pick_device(args.device) == "cuda" and max_replicas(args) > gpus:
        raise UserError(f"{requested}: each needs a GPU; this machine has {gpus}")
    signals = queue.SimpleQueue()
    with ray_server(args) as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signals.put(number))
        print_sampling_defaults(server_defaults(args, resolve_source(args.model)))
        write_stdout(f"{served_name(resolve_source(args.model))} at {address}\n")
        try:
            received = wait_for_signal(signals)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)  # which does not wait
        drain()
    if received == signal.SIGINT:
        raise KeyboardInterrupt


def wait_for_signal(signals: queue.SimpleQueue) -> int:
    """Return the first signal.

    If the GCS or raylet ends before, kill all processes that Ray started and raise UserError. Ray
    restarts its other processes, or runs without them.
    """
    from ray._private.worker import _global_node as node

    started = child_processes()
    while True:
        with contextlib.suppress(queue.Empty):
            return signals.get(timeout=1)
        children = child_processes()
        if ended := {name for name, _ in node.dead_processes()} & {"gcs_server", "raylet"}:
            kill({*started, *children})  # children of a killed raylet may survive
            logs = node.get_logs_dir_path()
            raise UserError(f"Ray's {min(ended)} has ended; its logs are in {logs}")
        started = children


def child_processes() -> list:
    """Return a psutil.Process for each process that Ray started."""
    import psutil  # comes with Ray, once that is imported

    return psutil.Process().children(recursive=True)


def kill(processes) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def drain() -> None:
    """Refuse new clients, and wait up to --drain-seconds for running requests."""
    from ray import serve

    serve.delete("default", _blocking=False)  # not serve.shutdown, which cuts connections first
    while serve.status().applications:
        time.sleep(0.1)


def check_options(args) -> None:
    """Raise UserError for options that would otherwise fail later, in other processes."""
    check_server_options(args)
    check_option_limits(args, LIMITS)
    if max_replicas(args) < args.replicas:
        raise UserError(
            f"--max-replicas {max_replicas(args)}: must be at least --replicas ({args.replicas})"
        )
    pick_device(args.device)
    source = resolve_source(args.model)
    config = load_config(source)
    load_encoding(source, config.vocab_size)
    find_chat(source, args.chat_template)
    server_defaults(args, source)
    budget_defaults(args, source)
    read_adapter(args.adapter, empty_model(config))
    load_adapters(empty_model(config), parse_adapters(args.lora_modules))
    if source.type != "random":
        source.weight_files()


def max_replicas(args) -> int:
    """Return the maximum number of replicas."""
    return args.replicas if args.max_replicas is None else args.max_replicas


@contextlib.contextmanager
def ray_server(args) -> Iterator[str]:
    """Start Ray and yield the server's address; end all processes on exit.

    Raises UserError if Ray is not installed or a replica fails to start.
    """
    with listen(args.host, args.port) as sock:
        port = sock.getsockname()[1]  # a free one for --port 0
    os.environ.update(RAY_ENVIRONMENT)
    try:
        import ray
        from ray import serve
    except ImportError:
        raise UserError("Ray is not installed: pip install '.[ray]'") from None
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=os.cpu_count(), _node_ip_address="127.0.0.1", **quiet)
    try:
        logging.getLogger("ray.serve").setLevel("ERROR")
        serve.start(http_options={"host": args.host, "port": port})
        try:
            serve.run(application(args))
        except RuntimeError as error:
            status = serve.status().applications["default"].deployments["Replica"]
            reason = (status.message or str(error)).strip().rpartition("\n")[2]
            raise UserError(reason.removeprefix("errors.UserError: ")) from None
        yield server_url(args.host, port)
    finally:
        started = child_processes()
        ray.shutdown()  # which tells workers to end, and does not wait
        kill(started)


def application(args):
    """Return the Ray Serve application: the HTTP ingress, bound to the engine replicas."""
    from ray import serve

    common_options = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": args.drain_seconds,
    }
    actor_options = {"num_cpus": args.cpus, "num_gpus": int(pick_device(args.device) == "cuda")}
    replicas = serve.deployment(
        Replica,
        autoscaling_config=autoscaling_config(args),
        ray_actor_options=actor_options,
        max_constructor_retry_count=1,  # a constructor that fails once always fails
        health_check_period_s=1,  # three failures mark a replica as unhealthy
        **common_options,
        **router_options(args),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress), ray_actor_options={"num_cpus": 0}, **common_options
    )
    return ingress.bind(args, replicas.bind(args))


def autoscaling_config(args) -> dict:
    """Return Ray's autoscaling configuration, with a target of max_num_seqs requests a replica."""
    return {
        "min_replicas": args.replicas,
        "max_replicas": max_replicas(args),
        "target_ongoing_requests": args.max_num_seqs,
        "metrics_interval_s": min(args.scale_seconds / 4, 10),
        "look_back_period_s": args.scale_seconds,
        "upscale_delay_s": args.scale_seconds,
        "downscale_delay_s": args.scale_seconds,
    }


def router_options(args) -> dict:
    """Return the deployment options that select a router; none for Ray's own."""
    if args.routing == "load":
        return {}
    from ray.serve.config import RequestRouterConfig

    config = engine_config(args)
    sizes = {name: getattr(config, name) for name in ("stride", "page_size", "max_num_seqs")}
    sizes["block_size"] = load_config(resolve_source(args.model)).block_size
    sizes["num_pages"] = config.cache_size(sizes["block_size"])
    ContextWindow(sizes["block_size"], args.stride)  # checks the stride
    router = {"request_router_class": "server.router:PrefixAwareRouter"}
    return {"request_router_config": RequestRouterConfig(**router, request_router_kwargs=sizes)}


def build(options: dict[str, str]):
    """Return the application of `serve run serve_ray:build replicas=3 max-num-seqs=8`."""
    args = make_parser().parse_args([f"--{name}={value}" for name, value in options.items()])
    check_options(args)
    return application(args)


if __name__ == "__main__":
    main()
