"""Serve a model with several engines on Ray, each in its own process."""

from command_line.models import pick_device
from command_line.parser import Parser
from errors import check_limits
from loading.load import load_config, resolve_source
from serve import add_server_options, check_server_options
from server.replicas import Ingress, Replica
from text.tokenizer import load_encoding

CPUS = (int | float, lambda value: 1e-4 <= value < 1e6, "a number from 0.0001 to below 1000000")
LIMITS = {
    "replicas": (int, lambda value: value >= 1, "an integer >= 1"),
    "cpus": CPUS,  # Ray's minimum is 0.0001
}
MAX_ONGOING_REQUESTS = 2**20  # concurrent requests; an engine enforces its own limit


def make_parser() -> Parser:
    parser = Parser(description="Serve a model with several engines, each in a process of Ray.")
    ray = parser.group("replicas")
    ray.add_argument("--replicas", metavar="N", type=int, default=2, help="number of engines")
    ray.add_argument(
        "--cpus", metavar="N", type=float, default=1, help="CPUs reserved for each engine"
    )
    add_server_options(parser)
    return parser


def check_options(args) -> None:
    """Raise UserError for options that would otherwise fail later, in other processes."""
    check_server_options(args)
    check_limits(LIMITS, replicas=args.replicas, cpus=args.cpus)
    pick_device(args.device)
    source = resolve_source(args.model)
    load_encoding(source, load_config(source).vocab_size)
    if source.type != "random":
        source.weight_files()


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
        num_replicas=args.replicas,
        ray_actor_options=actor_options,
        max_constructor_retry_count=1,  # a constructor that fails once always fails
        **common_options,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress), ray_actor_options={"num_cpus": 0}, **common_options
    )
    return ingress.bind(args, replicas.bind(args))


def build(options: dict[str, str]):
    """Return the application of `serve run serve_ray:build replicas=3 max-num-seqs=8`."""
    args = make_parser().parse_args([f"--{name}={value}" for name, value in options.items()])
    check_options(args)
    return application(args)
