"""Serve a model with several engines, each in a process of its own, on Ray."""

from command_line import Parser, pick_device
from errors import check_limits
from loading.load import load_config, parse_name
from loading.tokenizer import load_encoding
from serve import add_server_options, check_server_options
from server.replicas import Door, Replica

CPUS = (int | float, lambda value: 1e-4 <= value < 1e6, "a number from 0.0001 to below 1000000")
LIMITS = {
    "replicas": (int, lambda value: value >= 1, "an integer >= 1"),
    "cpus": CPUS,  # Ray's least is 0.0001
}
MANY = 2**20  # requests at a time: an engine says itself when it has too many


def make_parser() -> Parser:
    parser = Parser(description="Serve a model with several engines, each in its own process.")
    parser.add_argument("--replicas", type=int, default=2, help="how many engines")
    parser.add_argument("--cpus", type=float, default=1, help="that each engine has for itself")
    add_server_options(parser)
    return parser


def check(args) -> None:
    """Raise UserError for what could only fail later, in other processes."""
    check_server_options(args)
    check_limits(LIMITS, replicas=args.replicas, cpus=args.cpus)
    pick_device(args.device)
    source = parse_name(args.model)
    load_encoding(source, load_config(source).vocab_size)
    if source.kind != "random":
        source.weights()


def application(args):
    """What Ray Serve runs: the app, and behind it the engines."""
    from ray import serve

    shared = {"max_ongoing_requests": MANY, "graceful_shutdown_timeout_s": args.drain_seconds}
    needs = {"num_cpus": args.cpus, "num_gpus": int(pick_device(args.device) == "cuda")}
    engines = serve.deployment(
        Replica,
        num_replicas=args.replicas,
        ray_actor_options=needs,
        max_constructor_retry_count=1,  # what fails first fails always
        **shared,
    )
    door = serve.deployment(serve.ingress()(Door), ray_actor_options={"num_cpus": 0}, **shared)
    return door.bind(args, engines.bind(args))


def build(options: dict[str, str]):
    """For `serve run serve_ray:build replicas=3 max-rows=8`: the application with these options."""
    args = make_parser().parse_args([f"--{name}={value}" for name, value in options.items()])
    check(args)
    return application(args)
