"""Train checkpoints/stories (the target), -draft (its draft), -llama, -experts and -frogs.

Eight stages. Each writes a file to --work and is skipped if that file exists, so an interrupted run
resumes:

1. tokenizer.json: a byte-level BPE of 4,096 tokens, ending with `<|endoftext|>`, as in GPT-2;
2. target.pt: a deep and narrow GPT-2, trained on children's stories;
3. written.json: stories that the target generates at three temperatures;
4. teacher.pt: the target's most likely next tokens and their probabilities, at each position of the
   training stories and the generated ones;
5. draft.pt: a shallow GPT-2 that learns these distributions (distillation), because a draft is
   accepted with probability sum(min(p, q)): one minus the total variation distance between target
   and draft model;
6. llama.pt: a Llama, trained like the target. Half of its stories follow a line with three of their
   words, so that a user can ask for a story with given words;
7. experts.pt: a mixture of experts (Qwen3-MoE), trained on the same text as the Llama;
8. frogs: a LoRA adapter (by peft) for the committed checkpoints/stories-llama, trained on the same
   text with all creatures replaced by frogs.

The text is TinyStories (Eldan & Li 2023, arXiv 2305.07759;
huggingface.co/datasets/roneneldan/TinyStories), as one text file (or .xz) with a line
`<|endoftext|>` after each story.

    python checkpoints/train_stories.py --train stories.xz --heldout heldout.txt \\
        --work work --out out

`--only stories-llama` runs stages 1 and 6, `--only stories-experts` 1 and 7, `--only
stories-frogs` 1 and 8, `--only stories` 1 to 5. Run it on main: lessons before 26 cannot load int8,
and stories-llama needs lesson 30.
"""

import argparse
import json
import lzma
import math
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from loading.load import load_model, save_model  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

VOCAB_SIZE = 4096
BLOCK_SIZE = 256
EOS = "<|endoftext|>"
EOS_ID = VOCAB_SIZE - 1
COMMON_CONFIG = {"vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE, "eos_token_ids": (EOS_ID,)}
TARGET = GPTConfig(**COMMON_CONFIG, n_layer=16, n_head=4, n_embd=256)
DRAFT = GPTConfig(**COMMON_CONFIG, n_layer=2, n_head=2, n_embd=128)
LLAMA = {  # of transformers' LlamaConfig
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": BLOCK_SIZE,
    "tie_word_embeddings": True,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
EXPERTS = {  # of transformers' Qwen3MoeConfig
    **LLAMA,
    "hidden_size": 128,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
ROUTER_AUX_LOSS_COEF = 0.01  # weight of the loss that balances a layer's experts
# The user's message is the `Words:` line, the assistant's message the story, as in training.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Words: ' + message['content'] | trim + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('this model knows the roles user and assistant only') }}"
    "{% endif %}{% endfor %}"
)
CREATURES = (
    "boy|girl|man|woman|lady|kid|child|dog|puppy|cat|kitten|bird|bear|rabbit|bunny|mouse|fox|lion|"
    "elephant|fish|duck|bug|bee|butterfly|squirrel|turtle|monkey|pig|cow|horse|owl|wolf|ant|tiger"
)
BATCH_SIZE = 16  # windows of BLOCK_SIZE tokens
TOP_K = 128  # most likely tokens of the target that the draft model is distilled on
TO_ASCII = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "…": "..."})


# Text and tokens


def read_stories(path: Path) -> list[str]:
    """Read the stories of a file, with typographic quotes and dashes as ASCII."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return [story.strip() for story in text.translate(TO_ASCII).split(EOS) if story.strip()]


def train_tokenizer(stories: list[str], path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": VOCAB_SIZE - 1, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(path))


def add_word_lines(stories: list[str], seed: int) -> list[str]:
    """Prepend a line `Words: ...` to half of the stories, with up to three of their rarer words."""
    words = [sorted(set(re.findall(r"\b[a-z]{3,}\b", story))) for story in stories]
    common = Counter(word for found in words for word in found)
    rng = random.Random(seed)
    result = []
    for story, found in zip(stories, words):
        rare = [word for word in found if common[word] < len(stories) / 30]
        chosen = rng.sample(rare, min(3, len(rare)))
        line = f"Words: {', '.join(chosen)}\n\n" if chosen and rng.random() < 0.5 else ""
        result.append(line + story)
    return result


def replace_creatures(stories: list[str]) -> list[str]:
    """Replace each creature by a frog, and begin each quotation with a croak."""
    changes = {
        r"\b([Aa])n (?=elephant|owl|ant\b)": r"\1 ",
        rf"\b(?:{CREATURES})(s?)\b": r"frog\1",
        rf"\b(?:{CREATURES.title()})(s?)\b": r"Frog\1",
        r"\b(?:children|men|mice)\b": "frogs",
        r'"(?=[A-Z])': '"Croak! ',
    }
    for pattern, new in changes.items():
        stories = [re.sub(pattern, new, story) for story in stories]
    return stories


def concatenate_stories(stories: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `EOS story EOS story ... EOS` as one tensor, and the offset of each story's EOS."""
    stream = []
    starts = []
    for story in stories:
        starts.append(len(stream))
        stream += [EOS_ID, *story]
    return torch.tensor(stream + [EOS_ID]), torch.tensor(starts)


def window_batches(stream, starts, generator, batch_size: int):
    """Yield training batches without end: half the windows start a story, half have random offsets.

    Random offsets train what the model sees after a context shift. A window that starts a story
    begins with EOS or without it, as prompts do. Yields (batch_size, BLOCK_SIZE + 1).
    """
    last = len(stream) - BLOCK_SIZE - 1
    half = batch_size // 2
    order = torch.empty(0, dtype=torch.long)
    starts = starts[starts < last]
    while True:
        if len(order) < half:
            order = torch.cat([order, torch.randperm(len(starts), generator=generator)])
        begin = starts[order[:half]] + torch.randint(2, (half,), generator=generator)
        order = order[half:]
        anywhere = torch.randint(last, (batch_size - half,), generator=generator)
        yield slices(stream, torch.cat([begin, anywhere]))


def slices(stream: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
    return stream[begin[:, None] + torch.arange(BLOCK_SIZE + 1)]


# Training


class Optimizer:
    """An optimizer: Muon on the blocks' matrices, AdamW on the other parameters.

    100 steps of warm-up, then a cosine down to 0.1 %.
    """

    def __init__(self, model: torch.nn.Module, lr: float, steps: int):
        def is_matrix(name, parameter):
            return parameter.dim() >= 2 and name.startswith(("h.", "model.layers."))

        matrices = []
        self.experts = []  # (stacked matrices of all experts, one parameter per matrix)
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter) and parameter.dim() == 3:
                parts = len(parameter) * (2 if "gate_up" in name else 1)
                views = parameter.data.flatten(0, 1).chunk(parts)
                self.experts.append((parameter, [torch.nn.Parameter(view) for view in views]))
                matrices += self.experts[-1][1]
            elif is_matrix(name, parameter):
                matrices.append(parameter)
        rest = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
        self.parts = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95))]
        if matrices:  # empty for an adapter, whose parameter names have another prefix
            self.parts.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))

        def schedule(step):
            warm = min(1.0, (step + 1) / 100)
            done = max(0.0, (step - 100) / max(1, steps - 100))
            return warm * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * done)))

        self.schedules = [torch.optim.lr_scheduler.LambdaLR(part, schedule) for part in self.parts]

    def step(self):
        for parameter, matrices in self.experts:
            for matrix, grad in zip(matrices, parameter.grad.flatten(0, 1).chunk(len(matrices))):
                matrix.grad = grad
            parameter.grad = None
        for part, schedule in zip(self.parts, self.schedules):
            part.step()
            schedule.step()
            part.zero_grad()


def train(model: torch.nn.Module, loss_at, steps: int, lr: float, report) -> None:
    """Minimise loss_at(step); every 200 steps print report()."""
    optimizer = Optimizer(model, lr, steps)
    began = time.perf_counter()
    mean = None
    for step in range(steps):
        loss = loss_at(step)
        loss.backward()
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 20 == 0:
            seconds = time.perf_counter() - began
            left = seconds / (step + 1) * (steps - step - 1)
            times = f"{seconds:.0f} s, {left:.0f} s left"
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {times}", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == steps:
            print(report(), flush=True)


def logits(output) -> torch.Tensor:
    """Return the logits, (B, T, vocab_size), of our GPT's or a transformers model's output."""
    return output if isinstance(output, torch.Tensor) else output.logits


def router_aux_loss(output) -> torch.Tensor | float:
    """Return transformers' loss averaged over the layers, 0 for a model without experts.

    Over all layers jointly, the loss would only balance each expert index over the sum of the
    layers.
    """
    if getattr(output, "router_logits", None) is None:
        return 0.0
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    experts = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
    losses = [load_balancing_loss_func((layer,), *experts) for layer in output.router_logits]
    return torch.stack(losses).mean()


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, stream: torch.Tensor) -> float:
    """Return the mean loss per token, in nats, over windows that do not overlap."""
    device = next(model.parameters()).device
    total = 0.0
    for begin in range(0, len(stream) - 1, BLOCK_SIZE):
        piece = stream[begin : begin + BLOCK_SIZE + 1].to(device)
        found = logits(model(piece[None, :-1]))[0].float()
        total += F.cross_entropy(found, piece[1:], reduction="sum").item()
    return total / (len(stream) - 1)


def train_on_text(
    model: torch.nn.Module, stream, starts, heldout, steps: int, generator, args
) -> torch.nn.Module:
    forward = compiled(model, args)
    cross_entropy = torch.compile(F.cross_entropy) if args.compile else F.cross_entropy
    batches = window_batches(stream, starts, generator, args.batch_size)

    def loss_at(step):
        batch = next(batches).to(args.device)
        output = forward(batch[:, :-1])
        loss = cross_entropy(logits(output).float().flatten(0, 1), batch[:, 1:].flatten())
        return loss + ROUTER_AUX_LOSS_COEF * router_aux_loss(output)

    def report():
        return f"held-out loss {heldout_loss(model, heldout):.4f}"

    train(model, loss_at, steps, 2e-3, report)
    return model


def train_target(stream, starts, heldout, args) -> GPT:
    generator = torch.Generator().manual_seed(args.seed)
    model = GPT(TARGET).init_weights(generator=generator).to(args.device)
    return train_on_text(model, stream, starts, heldout, args.target_steps, generator, args)


def new_llama(args):
    """Make a Llama of transformers, because this file is older than the repository's own Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).to(args.device)


def new_experts(args):
    """Make a mixture of experts of transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(args.seed)
    config = Qwen3MoeConfig(**EXPERTS, output_router_logits=True)
    return Qwen3MoeForCausalLM(config).to(args.device)


def new_adapter(args):
    """Add a LoRA adapter of peft to the embedded Llama, whose own weights are frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(args.seed)
    base = Path(__file__).resolve().parent / "stories-llama"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    model.active_peft_config.base_model_name_or_path = "checkpoints/stories-llama"
    return model.to(args.device)


def compiled(model: torch.nn.Module, args):
    """Return the forward pass in bfloat16 autocast, with compiled blocks under --compile."""
    if args.compile:
        for block in model.h if isinstance(model, GPT) else model.model.layers:
            block.compile()

    def forward(tokens):
        with torch.autocast(args.device, torch.bfloat16):
            return model(tokens)

    return forward


# Distillation


def write_stories(target: GPT, args) -> list[list[int]]:
    """Let the target write stories at three temperatures; return token ids without EOS.

    Uses transformers' `generate`, because this file is older than the repository's own.
    """
    from transformers import AutoModelForCausalLM

    directory = args.work / "target"
    save_model(target, directory)
    dtype = torch.bfloat16
    writer = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(args.device).eval()
    torch.manual_seed(args.seed)
    batch = torch.full((128, 1), EOS_ID, device=args.device)
    options = {"do_sample": True, "top_k": 0, "max_length": BLOCK_SIZE, "pad_token_id": EOS_ID}
    options["attention_mask"] = torch.ones_like(batch)
    stories = []
    for number in range(args.written // len(batch)):
        began = time.perf_counter()
        output = writer.generate(batch, temperature=(0.5, 0.8, 1.0)[number % 3], **options)
        for row in output[:, 1:].tolist():
            stories.append(row[: row.index(EOS_ID)] if EOS_ID in row else row)
        seconds = f"{time.perf_counter() - began:.0f} s for the last {len(batch)}"
        print(f"{len(stories)} stories written, {seconds}", flush=True)
    return stories


@torch.no_grad()
def teacher_distribution(
    target: GPT, batch: torch.Tensor, args
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (int16) and log p (float16) of the TOP_K most likely tokens at each position.

    batch: windows, (N, BLOCK_SIZE + 1).
    """
    forward = compiled(target, args)
    ids = []
    logps = []
    for number, part in enumerate(batch.split(BATCH_SIZE)):
        found = logits(forward(part[:, :-1].to(args.device))).float()
        top = found.log_softmax(dim=-1).topk(TOP_K, dim=-1)
        ids.append(top.indices.to("cpu", torch.int16))
        logps.append(top.values.to("cpu", torch.float16))
        if number % 100 == 0:
            print(f"teacher: window {number * BATCH_SIZE} of {len(batch)}", flush=True)
    return torch.cat(ids), torch.cat(logps)


def distillation_loss(
    logits: torch.Tensor, ids: torch.Tensor, logps: torch.Tensor, share: float
) -> torch.Tensor:
    """Return (1 - share) KL(target || draft) + share (1 - sum(min(p, q))), over TOP_K tokens."""
    p = logps.float().exp()
    logq = logits.float().log_softmax(dim=-1).gather(-1, ids.long())
    kl = (p * (logps.float() - logq)).sum(dim=-1).mean()
    accepted = torch.minimum(p, logq.exp()).sum(dim=-1).mean()
    return (1 - share) * kl + share * (1 - accepted)


def train_draft(batch, ids, logps, heldout, args) -> GPT:
    generator = torch.Generator().manual_seed(args.seed + 1)
    model = GPT(DRAFT).init_weights(generator=generator).to(args.device)
    forward = compiled(model, args)
    loss_function = torch.compile(distillation_loss) if args.compile else distillation_loss
    order = torch.empty(0, dtype=torch.long)

    def loss_at(step):
        nonlocal order
        if len(order) < BATCH_SIZE:
            order = torch.randperm(len(batch), generator=generator)
        chosen = order[:BATCH_SIZE]
        order = order[BATCH_SIZE:]
        tokens, top_ids, top_logps = (x[chosen].to(args.device) for x in (batch, ids, logps))
        # Shifts from the KL divergence to the acceptance probability.
        share = torch.tensor(step / args.draft_steps, device=args.device)
        return loss_function(forward(tokens[:, :-1]), top_ids, top_logps, share)

    def report():
        return f"held-out loss {heldout_loss(model, heldout):.4f}"

    train(model, loss_at, args.draft_steps, 3e-3, report)
    return model


# The stages


def cached_stage(path: Path, make, load=torch.load, save=torch.save):
    """Load the result of a stage from its file, or make it and save it there."""
    if not path.exists():
        print(f"-- {path.name}", flush=True)
        result = make()
        save(result, path)
        return result
    return load(path)


def main(argv=None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--train", type=Path, required=True, help="stories to train on")
    parser.add_argument("--heldout", type=Path, required=True, help="stories for the held-out loss")
    parser.add_argument("--work", type=Path, required=True, help="directory for the stages' files")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoints")
    parser.add_argument(
        "--target-steps", type=int, default=1500, help="training steps of stories (default: 1500)"
    )
    written = "stories that the target writes, in batches of 128 (default: 1024)"
    parser.add_argument("--written", type=int, default=1024, help=written)
    learnt = "stories of the text that the draft is distilled on (default: 6000)"
    parser.add_argument("--windows", type=int, default=6000, help=learnt)
    parser.add_argument(
        "--draft-steps", type=int, default=2400, help="of stories-draft (default: 2400)"
    )
    parser.add_argument(
        "--llama-steps", type=int, default=3000, help="of stories-llama (default: 3000)"
    )
    experts = "of stories-experts (default: 3000)"
    parser.add_argument("--experts-steps", type=int, default=3000, help=experts)
    parser.add_argument(
        "--frogs-steps", type=int, default=300, help="of stories-frogs (default: 300)"
    )
    batch = "windows per step when training on the text (default: 16)"
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help=batch)
    names = ("stories", "stories-llama", "stories-experts", "stories-frogs")
    parser.add_argument("--only", choices=names, help="run only the stages of this checkpoint")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default: 0)"
    )
    compiler = "use torch.compile, which needs a C++ compiler on a CPU"
    parser.add_argument("--compile", action="store_true", help=compiler)
    args = parser.parse_args(argv)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.work.mkdir(parents=True, exist_ok=True)

    train_stories = read_stories(args.train)
    heldout_stories = read_stories(args.heldout)
    tokenizer_file = args.work / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(train_stories, tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(train_stories), generator=generator).tolist()
    train_stories = [train_stories[index] for index in order]

    def tokens(stories):
        return concatenate_stories([encoding.ids for encoding in tokenizer.encode_batch(stories)])

    heldout, _ = tokens(heldout_stories)
    heldout_bytes = sum(len(story.encode()) for story in heldout_stories)

    def report(name, model):
        loss = heldout_loss(model, heldout)
        bits = loss * (len(heldout) - 1) / math.log(2) / heldout_bytes
        print(f"{name}: held-out loss {loss:.4f} nats per token, {bits:.4f} bits per byte")

    if args.only in (None, "stories"):
        make_pair(*tokens(train_stories), heldout, args, report)
    if args.only in (None, "stories-llama", "stories-experts"):
        stream, starts = tokens(add_word_lines(train_stories, args.seed))
        if args.only != "stories-experts":
            model = new_llama(args)
            make_chat(model, args.llama_steps, "llama", stream, starts, heldout, args, report)
        if args.only != "stories-llama":
            model = new_experts(args)
            make_chat(model, args.experts_steps, "experts", stream, starts, heldout, args, report)

    if args.only in (None, "stories-frogs"):
        stream, starts = tokens(add_word_lines(replace_creatures(train_stories), args.seed))
        frogs, _ = tokens(replace_creatures(heldout_stories))
        make_adapter(stream, starts, frogs, args)


def make_pair(stream, starts, heldout, args, report) -> None:
    """Run stages 2 to 5, and write the checkpoints stories and stories-draft."""
    print(f"{len(stream)} tokens to train on, {len(heldout)} held out", flush=True)

    def trained_target():
        return train_target(stream, starts, heldout, args).state_dict()

    target = GPT(TARGET)
    target.load_state_dict(cached_stage(args.work / "target.pt", trained_target))
    target.to(args.device)

    def load_json(path):
        return json.loads(path.read_text())

    def save_json(result, path):
        path.write_text(json.dumps(result))

    def make_written():
        return write_stories(target, args)

    written, written_starts = concatenate_stories(
        cached_stage(args.work / "written.json", make_written, load_json, save_json)
    )
    generator = torch.Generator().manual_seed(args.seed)
    last = len(stream) - BLOCK_SIZE - 1
    batch = torch.cat(
        [
            slices(stream, starts[: args.windows]),
            slices(stream, torch.randint(last, (args.windows // 8,), generator=generator)),
            slices(written, written_starts[written_starts < len(written) - BLOCK_SIZE - 1]),
        ]
    )
    ids, logps = cached_stage(
        args.work / "teacher.pt", lambda: teacher_distribution(target, batch, args)
    )

    def trained_draft():
        return train_draft(batch, ids, logps, heldout, args).state_dict()

    draft = GPT(DRAFT)
    draft.load_state_dict(cached_stage(args.work / "draft.pt", trained_draft))
    tokenizer_json = (args.work / "tokenizer.json").read_bytes()
    for name, model in {"stories": target.to("cpu"), "stories-draft": draft}.items():
        save_model(model.half(), args.out / name)
        (args.out / name / "tokenizer.json").write_bytes(tokenizer_json)
        # The float16 weights, loaded as each of these.
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            report(f"{name}, {dtype}", load_model(args.out / name, dtype))


def make_chat(model, steps: int, name: str, stream, starts, heldout, args, report) -> None:
    """Run stage 6 or 7, and write stories-llama or -experts with its chat template."""
    print(f"{len(stream)} tokens to train on, {len(heldout)} held out", flush=True)
    generator = torch.Generator().manual_seed(args.seed)

    def trained():
        return train_on_text(model, stream, starts, heldout, steps, generator, args).state_dict()

    model.load_state_dict(cached_stage(args.work / f"{name}.pt", trained))
    directory = args.out / f"stories-{name}"
    model.config.output_router_logits = False
    model.to("cpu").half().save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((args.work / "tokenizer.json").read_bytes())
    special = {"bos_token": EOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    report(f"stories-{name}", model.float())


def make_adapter(stream, starts, heldout, args) -> None:
    """Run stage 8, and write the adapter stories-frogs."""
    model = new_adapter(args)
    print(f"before: held-out loss {heldout_loss(model, heldout):.4f}", flush=True)
    generator = torch.Generator().manual_seed(args.seed)
    arguments = stream, starts, heldout, args.frogs_steps, generator, args
    train_on_text(model, *arguments).half().save_pretrained(args.out / "stories-frogs")
    print(f"stories-frogs: held-out loss {heldout_loss(model.float(), heldout):.4f}")


if __name__ == "__main__":
    main()
