"""GPT-2's forward pass, written out.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters are named as in transformers'
GPT-2, so its files load unchanged. In the shape comments B is the batch, T the positions, C the width (`n_embd`).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import (
    Source,
    UserError,
    check_values,
    memory_for,
    parse_name,
    read_eos,
    read_json,
    read_number,
    read_sizes,
    read_tensors,
    write_checkpoint,
)
from int8 import Int8Embedding, store, to_int8, with_int8_layers

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, q, k, v -> attended values


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2; the defaults are those of the 124 M parameter model."""

    vocab_size: int = 50257
    block_size: int = 1024  # the context window, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    eos_token_ids: tuple[int, ...] = (50256,)  # each of them ends a text
    layer_norm_epsilon: float = 1e-5
    tied_head = True  # the head's weight is the token embedding's

    @property
    def bos_token_id(self) -> int:
        """What an empty prompt starts from."""
        return self.eos_token_ids[0]

    @property
    def head_dim(self) -> int:
        """Numbers in a query, key or value of one head."""
        return self.n_embd // self.n_head

    @property
    def n_kv_head(self) -> int:
        """Heads with keys and values of their own: in GPT-2 all of them."""
        return self.n_head


PRESETS = {
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}


def causal_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each position attends to itself and those before it. q, k, v and the result: (B, T, heads, head_dim).

    k and v may have fewer heads: then so many neighbouring query heads share one.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, head_dim)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


HAS_MKL = torch.backends.mkl.is_available()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, as `F.linear`. x: (..., in_features). weight: (out_features, in_features)."""
    rows = x.numel() // x.shape[-1]
    if rows > 8 or x.dtype != torch.float32 or x.device.type != "cpu" or not HAS_MKL:
        return F.linear(x, weight, bias)
    # Few rows cost the time it takes to read the weight, and MKL reads it faster as the left factor. But it reads it
    # slowly for a single column, in its matrix-vector product, so a single one is given twice.
    x2d = x.reshape(rows, x.shape[-1])
    columns = (torch.cat([x2d, x2d]) if rows == 1 else x2d).t()  # (in_features, rows)
    y = (weight @ columns)[:, :rows].t()
    if bias is not None:
        y = y + bias
    return y.contiguous().view(*x.shape[:-1], len(weight))


class Linear(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


class Model(nn.Module):
    """What all architectures share: loading, tying and writing weights, and a pass over whole texts.

    One of them adds `hidden` and `head`, an `lm_head`, and how its files are read and written.
    """

    native = None  # computes passes of few tokens, where there is a cache, if native.use_native sets it
    PRESETS: dict  # name -> config, the shapes that `random:` knows
    EMBEDDING: str  # the attribute that holds the token embedding
    PREFIX: str  # what stands before the names of tensors in a file
    SKIPPED: tuple[str, ...]  # endings of names of tensors that are in some files and not read
    TRANSPOSED: tuple[str, ...] = ()  # endings of names of linear layers that are stored as (in, out)
    RESIDUAL: tuple[str, ...]  # endings of names of weights that end a residual branch

    @staticmethod
    def read_config(source: Source):
        """The config in a model's config.json. Raises UserError if it describes another architecture."""
        raise NotImplementedError

    def config_fields(self) -> dict:
        """What `save_pretrained` writes into config.json, but for the dtype."""
        raise NotImplementedError

    def tie_weights(self) -> "Model":
        """Make the head and the token embedding one parameter, if they are one in this model."""
        if self.config.tied_head:
            embedding = getattr(self, self.EMBEDDING)
            self.lm_head.weight = embedding.weight
            if isinstance(embedding, Int8Embedding):
                self.lm_head.scale = embedding.scale
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and caches, and of all weights that are not int8."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    def forward(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        """Logits for the token after each position of whole texts.

        tokens: (B, T) ids, T from 1 to block_size. logits_to_keep: only the last so many positions, 0 for all; the
        head is the largest matrix of a small model, and generation needs its product with the last position only.
        Returns (B, logits_to_keep or T, vocab_size), in the weights' dtype. Raises UserError if tokens do not fit.
        """
        T, block_size = tokens.shape[1], self.config.block_size
        if not 1 <= T <= block_size:
            raise UserError(f"{T} tokens in one pass; this model takes 1 to block_size = {block_size}")
        x = self.hidden(tokens, torch.arange(T, device=tokens.device), causal_attention)  # (B, T, C)
        return self.head(x[:, -logits_to_keep:])

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> "Model":
        """GPT-2's initialisation: normal weights, those that end a residual branch smaller by sqrt(2 n_layer)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith(self.RESIDUAL) else 1.0
                parameter.normal_(std=std * scale, generator=generator)
        return self

    @classmethod
    def from_pretrained(cls, name, dtype: torch.dtype = torch.float32, device="cpu") -> "Model":
        """Load a model for inference, straight to its dtype and device; torch.int8 is that of lesson 23, in int8.py.

        name: what `checkpoint.parse_name` understands: a directory in Hugging Face form, a model of the hub (`gpt2`,
        its sizes, or `org/name`), or `random:` before a name in PRESETS, for that shape with random weights.
        Raises UserError, in one line that says what is wrong, for anything else, and if memory runs out.
        """
        source = parse_name(name)
        config = cls.PRESETS[source.name] if source.kind == "random" else cls.read_config(source)
        with torch.device("meta"):
            model = cls(config)
        size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
        floats = torch.float32 if dtype == torch.int8 else dtype  # of all that is not int8
        with memory_for(f"{source.label}: {size:,} bytes of weights"):
            if source.kind == "random":
                seeded = torch.Generator(device).manual_seed(0)  # the same weights in each process
                model = model.to(floats).to_empty(device=device).tie_weights().init_weights(generator=seeded).eval()
                return to_int8(model) if dtype == torch.int8 else model
            shapes = {name: weight.shape for name, weight in model.named_parameters()}
            if dtype == torch.int8:
                with_int8_layers(model)
            weights = {}
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                kind = tensor.dtype if tensor.dtype == torch.int8 else floats
                weights[name] = torch.empty(tensor.shape, dtype=kind, device=device)
            for name, rows, block in read_tensors(source.weights(), shapes, cls.PREFIX, cls.SKIPPED, cls.TRANSPOSED):
                store(weights, name, rows, block)
        model.load_state_dict(weights, assign=True, strict=False)
        return model.tie_weights().eval()

    def save_pretrained(self, directory) -> None:
        """Write `config.json` and `model.safetensors`, in the weights' dtype; transformers reads them too.

        Raises UserError if they cannot be written; then nothing half-written is left. Raises ValueError for weights in
        int8, which this format does not hold.
        """
        if isinstance(getattr(self, self.EMBEDDING), Int8Embedding):
            raise ValueError("a model with int8 weights is not saved; save the one that it was made from")
        fields = self.config_fields() | {"dtype": str(self.dtype).removeprefix("torch.")}
        # Not state_dict: there the head is a second name for the embedding, and it would be written twice.
        weights = {
            name: (weight.t() if name.endswith(self.TRANSPOSED) else weight).detach().contiguous()
            for name, weight in self.named_parameters()
        }
        write_checkpoint(Path(directory), fields, weights)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = (3, config.n_head, config.head_dim)
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, attend):
        q, k, v = self.c_attn(x).view(*x.shape[:-1], *self.heads).unbind(-3)  # each (..., n_head, head_dim)
        return self.c_proj(attend(q, k, v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x, attend):
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp(self.ln_2(x))


SIZES = {  # field of GPTConfig -> its key in config.json, and the largest value read: 10**9 layers would take hours
    "vocab_size": ("vocab_size", 10**6),
    "block_size": ("n_positions", 10**6),
    "n_layer": ("n_layer", 1000),
    "n_head": ("n_head", 1000),
    "n_embd": ("n_embd", 10**5),
}


class GPT(Model):
    PRESETS, EMBEDDING, PREFIX = PRESETS, "wte", "transformer."
    SKIPPED = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")  # the head again, or old mask buffers
    TRANSPOSED, RESIDUAL = ("c_attn.weight", "c_proj.weight", "c_fc.weight"), ("c_proj.weight",)

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # Not nn.Embedding(...): that draws random weights, and on the meta device the first draw imports for a second.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.block_size, config.n_embd), freeze=False)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the last block gives at each position, (..., C).

        tokens: ids, of any shape that `attend` understands. positions: where each stands in its text, 0 to
        block_size - 1, of a shape that broadcasts to that of tokens. attend(layer, q, k, v): queries, keys and values
        of these positions, (..., heads, head_dim), to what attention gives, of the shape of q. It alone knows which
        positions see each other, and what came before.
        """
        x = self.wte(tokens) + self.wpe(positions)  # (..., C)
        for layer, block in enumerate(self.h):
            x = block(x, functools.partial(attend, layer))
        return x

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits for the token after each position: (..., C) to (..., vocab_size), in the weights' dtype."""
        return self.lm_head(self.ln_f(hidden))

    def config_fields(self) -> dict:
        config, eos = self.config, self.config.eos_token_ids
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "layer_norm_epsilon": config.layer_norm_epsilon,
            "activation_function": "gelu_new",
            "bos_token_id": config.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        }

    @staticmethod
    def read_config(source: Source) -> GPTConfig:
        file = source.file("config.json")
        raw = read_json(file)
        fields = read_sizes(file, raw, SIZES, vars(GPTConfig()))
        supported = {  # what this forward pass computes
            "model_type": ("gpt2",),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "n_inner": (None, 4 * fields["n_embd"]),
            "tie_word_embeddings": (True,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
        check_values(file, raw, supported)
        if fields["n_embd"] % fields["n_head"]:
            raise UserError(f"{file}: n_embd {fields['n_embd']} is not a multiple of n_head {fields['n_head']}")
        eos = read_eos(source, raw, fields["vocab_size"], GPTConfig.eos_token_ids[0])
        epsilon = read_number(file, raw, "layer_norm_epsilon", GPTConfig.layer_norm_epsilon, 1)
        return GPTConfig(**fields, eos_token_ids=eos, layer_norm_epsilon=epsilon)
