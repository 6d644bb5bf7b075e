"""Train a draft head for a target: a block that predicts its hidden states, as in EAGLE.

    python checkpoints/train_draft_head.py --model checkpoints/stories-llama --inner 512 \\
        --work work --out head

The target is a Llama without biases, QK-norm and experts, such as SmolLM2. Four stages. Each writes
a file to --work, and is skipped if that file exists, so an interrupted run resumes. Other options
of a finished stage need another --work:

1. texts.json: texts that the target writes. It writes an opening at temperature 1 and continues it
   greedily or at temperature 0.8. --chat: in place of most openings, it writes a user's message,
   and then the reply (Magpie, 2406.08464). One text in twenty is held out.
2. states.pt: the target's hidden states at all tokens, in bfloat16.
3. token_ids.json: the tokens that may be drafted, those with the highest mean probability.
4. head.pt: the head. The block begins as the target's last one, with the MLP's most active
   channels, and `fc` as the ridge regression of that block's input on the token's embedding and the
   state before. Then the head learns the target's distribution, and in a second pass over its own
   outputs, the distribution one token later (EAGLE-3, 2503.01840). The loss shifts from the cross
   entropy to its mean with the probability of a rejection, 1 - sum(min(p, q)).

The same seed and number of threads give the same head.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line.parser import Parser, run_script  # noqa: E402
from draft_head import DraftHead  # noqa: E402
from engine.engine import Engine  # noqa: E402
from errors import UserError  # noqa: E402
from llama import Llama, LlamaConfig  # noqa: E402
from loading.draft_head import save_draft_head  # noqa: E402
from loading.load import load_model, resolve_source  # noqa: E402
from native import use_native  # noqa: E402
from sampling import SamplingParams  # noqa: E402
from text.chat import Chat  # noqa: E402
from text.tokenizer import load_encoding  # noqa: E402

WINDOW = 256  # positions of a training window, and the head's sliding window
MAX_TOKENS = 320  # that the target writes after an opening
OPENINGS = 2, 4, 8, 12, 24  # lengths in tokens
MESSAGES = 0.7  # of the openings of a chat model
ROUNDS = 2  # passes over a window: the second reads the outputs of the first
STATES_BATCH = 4096  # tokens of a pass that computes states
LOSS_ROWS = 128  # rows of logits at a time, which fit in the processor's cache


# 1. Texts


def write_texts(args) -> list[dict]:
    """Let the target write texts; return tokens, prompt_length and temperature of each."""
    source = resolve_source(args.model)
    model = load_model(source, torch.int8)
    use_native(model)
    config = model.config
    before, after = user_markers(source, config.vocab_size) if args.chat else ([], [])
    rng = random.Random(args.seed)
    engine = Engine(model, max_num_seqs=args.max_num_seqs, num_pages=32 * args.max_num_seqs)
    texts = []
    openings = {}  # request -> what follows it before a reply; None: it is not an opening
    count = 0

    def add(prompt: list[int], length: int, temperature: float, then: list[int] | None) -> None:
        length = min(length, config.block_size - len(prompt))
        params = SamplingParams(length, temperature=temperature, seed=rng.randrange(2**32))
        openings[engine.add(prompt, params)] = then

    while count < args.tokens:
        while len(openings) < 2 * args.max_num_seqs:
            if args.chat and rng.random() < MESSAGES:
                add(before, 80, 1.0, after)
            else:
                add([config.bos_token_id], rng.choice(OPENINGS), 1.0, [])
        for event in engine.step():
            request = event.request
            if not event.finish_reason:
                continue
            then = openings.pop(request)
            if then is None:
                temperature = request.params.temperature
                texts.append([request.prompt_length, temperature, request.tokens])
                count += len(request.output)
                if len(texts) % 50 == 0:
                    print(f"{count} tokens written", flush=True)
            elif event.finish_reason == ("stop" if then else "length"):  # a whole message
                prompt = request.tokens[:-1] + then if then else request.tokens
                add(prompt, MAX_TOKENS, rng.choice((0.0, 0.8)), None)
    keys = "prompt_length", "temperature", "tokens"
    return [dict(zip(keys, text)) for text in texts]


def user_markers(source, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return what a chat template writes before a user's message, and between it and the reply."""
    encoding = load_encoding(source, vocab_size)
    text = Chat(source).render([{"role": "user", "content": "MESSAGE"}])
    return tuple(encoding.encode(part, allowed_special="all") for part in text.split("MESSAGE"))


# 2. States


@torch.inference_mode()
def compute_states(model, texts: list[list[int]]) -> torch.Tensor:
    """Return the last hidden states of all texts, concatenated, (n, C), in bfloat16."""
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    states = torch.empty(starts[-1], model.config.n_embd, dtype=torch.bfloat16)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    while order:
        length = len(texts[order[-1]])
        batch = order[-max(STATES_BATCH // length, 1) :]
        del order[-len(batch) :]
        rows = [texts[index] + [0] * (length - len(texts[index])) for index in batch]
        with torch.autocast("cpu", torch.bfloat16):
            x = model.hidden(torch.tensor(rows), torch.arange(length), model.causal_attention)
        for index, row in zip(batch, x):
            states[starts[index] : starts[index + 1]] = row[: len(texts[index])]
        print(f"states: {len(order)} texts left", flush=True)
    return states


# 3. Tokens to draft


@torch.inference_mode()
def pick_token_ids(model, states: torch.Tensor, count: int, args) -> list[int]:
    """Return the tokens with the highest mean probability, ascending, and all EOS tokens."""
    generator = torch.Generator().manual_seed(args.seed)
    sums = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    for rows in torch.randperm(len(states), generator=generator)[: args.counted].split(512):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.head(states[rows].float())
        sums += logits.float().softmax(dim=-1).sum(dim=0)
    sums[list(model.config.eos_token_ids)] = math.inf
    return sums.topk(min(count, len(sums))).indices.sort().values.tolist()


# 4. The head


class Unrolled:
    """Attention of a head whose round r reads its own outputs of round r - 1.

    Position i of round r, counted from 0, stands for a draft after r others. It attends to the
    target's states up to position i - r, and to one position of each later round, as in generation.
    """

    def __init__(self, length: int):
        self.positions = torch.arange(length)
        self.keys = []
        self.values = []

    def attend(self, layer: int, q, k, v):
        i, j = self.positions[:, None], self.positions
        self.keys.append(k.transpose(1, 2))
        self.values.append(v.transpose(1, 2))
        last = len(self.keys) - 1
        masks = [j <= i - last, *(j == i - last + later for later in range(1, last + 1))]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2),
            torch.cat(self.keys, dim=2),
            torch.cat(self.values, dim=2),
            attn_mask=torch.cat(masks, dim=1),
            enable_gqa=True,
        ).transpose(1, 2)


def unroll(head: DraftHead, tokens: torch.Tensor, states: torch.Tensor, rounds: int):
    """Yield the outputs of each round, (B, T, C). tokens: (B, T + 1). states: (B, T, C)."""
    attention = Unrolled(states.shape[1])
    for _ in range(rounds):
        x = head.hidden(tokens[:, 1:], attention.positions, attention.attend, states)
        yield x
        states = torch.cat([states[:, :1], x[:, :-1]], dim=1)


@torch.compile(dynamic=False)
def loss_and_gradient(target_logits, logits, share):
    """Return the loss, the sum of acceptance probabilities and the loss's gradient, in bfloat16.

    The loss is the sum of (1 - share) cross entropy + share (1 - sum(min(p, q))) over all rows.
    """
    p = target_logits.float().softmax(dim=-1)
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    q = (logits - normaliser).exp()
    cross_entropy = (p * (normaliser - logits)).sum(dim=-1)
    accepted = torch.minimum(p, q).sum(dim=-1, keepdim=True)
    below = q * (q < p).float()
    gradient = (1 - share) * (q - p) + share * (q * below.sum(dim=-1, keepdim=True) - below)
    loss = (1 - share) * cross_entropy + share * (1 - accepted[:, 0])
    return loss.sum(), accepted.sum(), gradient.to(torch.bfloat16)


class DistillationLoss(torch.autograd.Function):
    """The mean loss over rows of hidden states, LOSS_ROWS at a time."""

    accepted = 0.0  # mean acceptance probability of the last call

    @staticmethod
    def forward(ctx, x, target_x, weight, share):
        """x, target_x: (n, C), after the final norm. weight: rows of the head, bfloat16."""
        gradient = torch.empty_like(target_x)
        total = DistillationLoss.accepted = 0.0
        for part in torch.arange(len(x)).split(LOSS_ROWS):
            rows = slice(part[0], part[-1] + 1)
            logits = x[rows].to(torch.bfloat16) @ weight.T
            loss, accepted, part_gradient = loss_and_gradient(
                target_x[rows] @ weight.T, logits, share
            )
            gradient[rows] = part_gradient @ weight
            total += loss.item()
            DistillationLoss.accepted += accepted.item() / len(x)
        ctx.save_for_backward(gradient)
        return torch.tensor(total / len(x))

    @staticmethod
    def backward(ctx, gradient):
        (x_gradient,) = ctx.saved_tensors
        return x_gradient.float() * gradient / len(x_gradient), None, None, None


@torch.no_grad()
def start_from_last_block(head: DraftHead, model, texts: list[list[int]], args) -> None:
    """Copy the target's last block, and set `fc` by ridge regression to that block's input.

    Each row is divided by the root mean square of its input, which is large for a first token. The
    MLP keeps the channels with the largest outputs.
    """
    block = model.layers[-1]
    inputs = []
    activations = []
    hooks = [
        block.register_forward_pre_hook(lambda module, args: inputs.append(args[0])),
        block.mlp.down_proj.register_forward_pre_hook(
            lambda module, args: activations.append(args[0])
        ),
    ]
    embedding, norm, _ = head.target_layers
    C = head.config.n_embd
    # Sums of x^T x, x^T y and of squared activations.
    squares = torch.zeros(2 * C, 2 * C)
    products = torch.zeros(2 * C, C)
    energy = torch.zeros(model.config.n_inner)
    count = 0
    for text in texts:
        if count >= args.counted:
            break
        count += len(text)
        tokens = torch.tensor(text)
        with torch.autocast("cpu", torch.bfloat16):
            positions = torch.arange(len(text))
            states = model.hidden(tokens[None], positions, model.causal_attention)[0].float()
        y = inputs.pop()[0, 1:].float()
        x = torch.cat([head.embed_norm(embedding(tokens[1:])), norm(states[:-1])], dim=-1)
        scale = y.square().mean(dim=-1, keepdim=True).rsqrt()
        x = x * scale
        squares += x.T @ x
        products += x.T @ (y * scale)
        energy += (activations.pop()[0, 1:].float() * scale).square().sum(dim=0)
    for hook in hooks:
        hook.remove()
    squares += 1e-3 * squares.diagonal().mean() * torch.eye(2 * C)
    weights = dict(block.state_dict())
    energy *= weights["mlp.down_proj.weight"].square().sum(dim=0)
    kept = energy.topk(head.config.n_inner).indices.sort().values
    for name in ("gate_proj", "up_proj"):
        weights[f"mlp.{name}.weight"] = weights[f"mlp.{name}.weight"][kept]
    weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"][:, kept]
    head.block.load_state_dict(weights)
    head.fc.weight.copy_(torch.linalg.solve(squares, products).T)


def new_head(model, token_ids: list[int], args) -> DraftHead:
    """Return a head whose matrices are not set yet."""
    config = model.config
    own = LlamaConfig(
        vocab_size=config.vocab_size,
        block_size=config.block_size,
        n_layer=1,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        n_embd=config.n_embd,
        n_inner=args.inner,
        eos_token_ids=config.eos_token_ids,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        sliding_windows=(WINDOW,),
    )
    head = DraftHead(own, token_ids, model)
    torch.nn.init.ones_(head.embed_norm.weight)
    return head


def train_head(model, token_ids: list[int], texts: list[list[int]], states, args) -> DraftHead:
    """Return a head trained on texts. states: of their tokens, concatenated, (n, C)."""
    head = new_head(model, token_ids, args)
    start_from_last_block(head, model, texts, args)
    tokens = torch.tensor([token for text in texts for token in text])
    for weight in model.parameters():
        weight.requires_grad_(False)
    _, norm, lm_head = head.target_layers
    rows = lm_head.weight.to(torch.bfloat16)
    matrices = [weight for weight in head.parameters() if weight.dim() == 2]
    vectors = [weight for weight in head.parameters() if weight.dim() == 1]
    options = {"lr": args.lr, "weight_decay": 0.0}
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), **options),
    ]
    generator = torch.Generator().manual_seed(args.seed + 1)
    order = torch.empty(0, dtype=torch.long)
    began = time.perf_counter()
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 15)
        rate = args.lr * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        if len(order) < args.batch_size:  # each epoch has other windows
            offset = torch.randint(WINDOW, (1,), generator=generator).item()
            windows = offset + WINDOW * torch.arange((len(tokens) - offset - 1) // WINDOW)
            order = windows[torch.randperm(len(windows), generator=generator)]
        begin = order[: args.batch_size]
        order = order[args.batch_size :]
        index = begin[:, None] + torch.arange(WINDOW + 1)
        batch = tokens[index]
        batch_states = states[index].float()
        goal = norm(batch_states[:, 1:]).to(torch.bfloat16).flatten(0, 1)
        chosen = torch.randperm(len(goal), generator=generator)[: len(goal) // 2]  # half the cost
        share = torch.tensor(0.5 * max(0.0, (step / args.steps - 0.3) / 0.7))
        loss = torch.tensor(0.0)
        accepted = []
        with torch.autocast("cpu", torch.bfloat16):
            for x in unroll(head, batch, batch_states[:, :-1], ROUNDS):
                x = norm(x.float()).flatten(0, 1)[chosen]
                loss = loss + DistillationLoss.apply(x, goal[chosen], rows, share)
                accepted.append(f"{DistillationLoss.accepted:.3f}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            seconds = time.perf_counter() - began
            rounds = " ".join(accepted)
            print(f"step {step + 1}/{args.steps} accepted {rounds} {seconds:.0f} s", flush=True)
    return head


# Acceptance


@torch.no_grad()
def acceptance_by_position(model, head: DraftHead, texts: list[dict], states, count: int) -> list:
    """Return how often the i-th draft equals the target's greedy token, after i - 1 that did.

    texts: greedy ones. states: of each of them.
    """
    right = torch.zeros(count)
    tried = torch.zeros(count)
    for text, own in zip(texts, states):
        tokens = torch.tensor(text["tokens"])
        own = own.float()
        T = len(tokens) - 1
        best = model.head(own[1:]).argmax(dim=-1)  # after each token but the first
        alive = torch.arange(T) >= text["prompt_length"] - 1  # by the position of the first draft
        for draft, x in enumerate(unroll(head, tokens[None], own[None, :-1], count)):
            found = head.head(x[0]).argmax(dim=-1) == best
            alive = alive[: T - draft]
            tried[draft] += alive.sum()
            alive = alive & found[draft:]
            right[draft] += alive.sum()
    return [round(each, 3) for each in (right / tried).tolist()]


# The stages


def cached_stage(args, name: str, options: tuple[str, ...], make, load, save):
    """Load the result of a stage from its file, or make it and save it there.

    options: those that the result depends on. Raises UserError if the file was made with others.
    """
    path = args.work / name
    note = args.work / f"{name}.options"
    used = {option: str(getattr(args, option)) for option in options}
    if not path.exists():
        print(f"-- {name}", flush=True)
        part = args.work / f"{name}.part"
        save(make(), part)
        save_json(used, note)
        part.replace(path)  # whole, or not there
    if load_json(note) != used:
        raise UserError(f"--work {args.work}: {name} was made with {load_json(note)}")
    return load(path)


def load_json(path: Path):
    return json.loads(path.read_text())


def save_json(result, path: Path) -> None:
    path.write_text(json.dumps(result))


def check_options(args, model) -> None:
    """Raise UserError for bad options and for targets that a head cannot be trained for."""
    for name in NUMBERS:
        value = getattr(args, name.replace("-", "_"))
        least = 0 if name == "seed" else 1
        if not least <= value < 2**32:
            raise UserError(f"--{name} {value}: must be from {least} to {2**32 - 1}")
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr {args.lr}: must be above 0")
    config = model.config
    if type(model) is not Llama or config.qkv_bias or config.qk_norm or config.experts:
        allowed = "must be a Llama without biases, QK-norm and experts"
        raise UserError(f"--model {args.model}: {allowed}")
    if config.block_size < WINDOW:
        least = f"must be at least {WINDOW}"
        raise UserError(f"--model {args.model}: block_size {config.block_size}: {least}")
    if args.inner > config.n_inner:
        raise UserError(f"--inner {args.inner}: must be at most the target's, {config.n_inner}")


def run(args) -> None:
    """Run all stages. Raises UserError as `check_options` and `cached_stage` do."""
    source = resolve_source(args.model)
    model = load_model(source, torch.float32)
    check_options(args, model)
    try:
        args.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--work {args.work}: {error.strerror}") from None
    options = "model", "chat", "tokens", "max_num_seqs", "seed"
    texts = cached_stage(
        args, "texts.json", options, lambda: write_texts(args), load_json, save_json
    )
    lengths = [len(text["tokens"]) for text in texts]
    states = cached_stage(
        args,
        "states.pt",
        options,
        lambda: compute_states(model, [text["tokens"] for text in texts]),
        torch.load,
        torch.save,
    )
    heldout = texts[: len(texts) // 20 + 1]
    first = sum(lengths[: len(heldout)])
    training = [text["tokens"] for text in texts[len(heldout) :]]
    if sum(map(len, training)) < WINDOW * (args.batch_size + 2):
        least = f"at least {2 * WINDOW * (args.batch_size + 2)}"
        raise UserError(f"--tokens {args.tokens}: must be {least} with this batch size")
    options += "token_ids", "counted"
    ids = cached_stage(
        args,
        "token_ids.json",
        options,
        lambda: pick_token_ids(model, states[first:], args.token_ids, args),
        load_json,
        save_json,
    )
    weights = cached_stage(
        args,
        "head.pt",
        (*options, "inner", "steps", "batch_size", "lr"),
        lambda: train_head(model, ids, training, states[first:], args).state_dict(),
        torch.load,
        torch.save,
    )
    head = new_head(model, ids, args)
    head.load_state_dict(weights)
    parts = states[:first].split(lengths[: len(heldout)])
    greedy = [pair for pair in zip(heldout, parts) if pair[0]["temperature"] == 0]
    if greedy:
        rates = acceptance_by_position(model, head, *zip(*greedy), 5)
        print(f"greedy acceptance by position, {len(greedy)} held-out texts: {rates}")
    save_draft_head(head.half(), args.out)


NUMBERS = {
    "tokens": (2_000_000, "tokens that the target writes"),
    "max-num-seqs": (64, "texts that it writes at a time"),
    "token-ids": (8192, "tokens that the head may draft"),
    "counted": (40_000, "positions that pick the tokens to draft and fit the regression"),
    "inner": (1344, "width inside the MLP"),
    "steps": (4000, "training steps"),
    "batch-size": (4, f"windows of {WINDOW} tokens in a step"),
    "seed": (0, "seed of all random numbers"),
}


def main(argv=None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--model", required=True, help="the target: a directory of a Llama, or smollm2"
    )
    parser.add_argument("--work", type=Path, required=True, help="directory for the stages' files")
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--chat", action="store_true", help="also let the target write chats")
    for name, (default, text) in NUMBERS.items():
        options = {"type": int, "default": default, "metavar": "N"}
        parser.add_argument(f"--{name}", **options, help=f"{text} (default: {default})")
    parser.add_argument("--lr", type=float, default=0.01, help="peak learning rate (default: 0.01)")
    run_script(parser, run, argv)


if __name__ == "__main__":
    main()
