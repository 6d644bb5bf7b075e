"""The base class of all models, and GPT-2's forward pass: begin with `GPT.hidden`.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters are named as
in transformers' GPT-2, so its files load unchanged. In the shape comments B is the batch, T the
positions, C the width (`n_embd`).
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from adapters import Adapters, use_adapters
from cache import Span, capped_attention, layer_sliding_windows, make_causal_mask
from errors import UserError
from sampling import Sequence, sample_batch, select_rows, zero_nonfinite_rows

# (layer, q, k, v) -> attention output
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT-2; the defaults describe the 124M-parameter model."""

    vocab_size: int = 50257
    block_size: int = 1024  # the context window, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    eos_token_ids: tuple[int, ...] = (50256,)  # each ends a sequence
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: ClassVar[bool] = True  # the head shares the embedding's weight
    sliding_windows: ClassVar[tuple] = ()  # as in LlamaConfig
    attn_logit_softcapping: ClassVar[None] = None  # as in Gemma2Config

    @property
    def bos_token_id(self) -> int:
        """Return the token that an empty prompt starts from."""
        return self.eos_token_ids[0]

    @property
    def head_dim(self) -> int:
        """Return the width of one head's query, key or value."""
        return self.n_embd // self.n_head

    @property
    def n_kv_head(self) -> int:
        """Return the number of key-value heads: in GPT-2 all heads."""
        return self.n_head

    @property
    def n_inner(self) -> int:
        """Return the width inside the MLP."""
        return 4 * self.n_embd

    @property
    def norm_eps(self) -> float:
        return self.layer_norm_epsilon


def causal_attention(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Let each position attend to itself and earlier ones. Tensors: (B, T, heads, head_dim).

    k and v may have fewer heads: neighbouring query heads then share one (grouped-query attention).
    sliding_window: as in `make_causal_mask`. softcap: as in `cached_attention`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, head_dim)
    mask = None
    if softcap or (sliding_window is not None and sliding_window < q.shape[2]):
        positions = torch.arange(q.shape[2], device=q.device)
        mask = make_causal_mask(positions[:, None], positions, sliding_window)  # (T, T)
    if softcap:
        return capped_attention(q, k, v, mask, softcap).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    ).transpose(1, 2)


class PassOutput(NamedTuple):
    """The result of a pass, with a row for each kept position."""

    logits: torch.Tensor  # (N, vocab_size), float32
    hidden: torch.Tensor  # (N, C), the last block's output, from which `Model.head` computes logits


class StepOutput(NamedTuple):
    """The result of `step`; the next one may overwrite its tensors."""

    tokens: list[int]  # of each sequence; arbitrary where its logits are not finite
    finite: list[bool]  # whether the logits of each kept position are
    logits: torch.Tensor  # (len(finite), vocab_size); zeros where they are not finite
    hidden: torch.Tensor  # (len(finite), C), as in PassOutput


class TorchRunner:
    """The torch backend: computes logits and samples tokens.

    A backend is a class with these methods; `Model.runner` is the model's backend. The model is
    an argument of each call, so a runner keeps no model alive.
    """

    tp_group = None  # the tensor-parallel processes, if there are several

    def logits(self, model, cache, spans: list[Span], keep: list[int]) -> torch.Tensor:
        """Return the logits of `forward`."""
        return self.forward(model, cache, spans, keep).logits

    def forward(self, model, cache, spans: list[Span], keep: list[int]) -> PassOutput:
        """Run one pass over all spans, and keep the last keep[i] positions of span i."""
        tokens, positions, ends = cache.prepare(spans)
        row_ranges = [range(end - len(span.tokens), end) for span, end in zip(spans, ends)]
        with use_adapters(model, [span.adapter for span in spans], row_ranges):
            x = model.hidden(tokens, positions, cache.attend).flatten(0, -2)  # (N, C)
        rows = [row for end, count in zip(ends, keep) for row in range(end - count, end)]
        if rows != list(range(len(x))):  # in most steps each span is one token
            x = x[rows]
        return PassOutput(model.head(x).float(), x)

    def step(
        self,
        model,
        cache,
        spans: list[Span],
        keep: list[int],
        sequences: list[Sequence],
        rows: list[int],
    ) -> StepOutput:
        """Run a pass as `forward` does, and sample the next token of each sequence.

        sequences: greedy or with a seed. rows: of the logits, one for each of them.
        """
        logits, hidden = self.forward(model, cache, spans, keep)
        finite = zero_nonfinite_rows(logits)
        tokens = self.sample_batch(select_rows(logits, rows), sequences)
        return StepOutput(tokens, finite, logits, hidden)

    def sample_batch(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """Sample the next token of each sequence; arguments as in `sampling.sample_batch`."""
        return sample_batch(logits, sequences, generator)


class Model(nn.Module):
    """The base of all architectures: a pass over whole sequences, weight tying and initialisation.

    An architecture adds `hidden`, `head` and the roles of its layers. Loading, export, tensor
    parallelism and the C backend find layers by role.
    ROLES: role -> the layer's name here and in Hugging Face's files, and its name in GGUF files; *
    is the block's number. BASE_MODEL_PREFIX: optional prefix of names in Hugging Face's files.
    TRANSPOSED: roles of matrices that these files store as (in, out). IGNORED_SUFFIXES: suffixes of
    tensors in some of these files that nothing reads. KEY_MAPPING: patterns of other names in
    some files, with their replacements. SKIP_PREFIXES: parts of larger models that these files may
    also hold. FUSED_LAYERS: layer in some files -> the layers whose rows it holds, in this order.
    """

    runner = TorchRunner()  # the backend: passes with a KV cache, and sampling
    adapters: Adapters | None = None  # LoRA adapters that requests may select
    local_n_kv_head: int | None = None  # this rank's key-value heads, with tensor parallelism
    ROLES: dict[str, tuple[str, str]]
    BASE_MODEL_PREFIX = ""
    TRANSPOSED: tuple[str, ...] = ()
    IGNORED_SUFFIXES: tuple[str, ...] = ()
    KEY_MAPPING: tuple[tuple[str, str], ...] = ()
    SKIP_PREFIXES: tuple[str, ...] = ()
    FUSED_LAYERS: dict[str, tuple[str, ...]] = {}

    def map_key(self, name: str) -> str | None:
        """Return the canonical name of a tensor in a file; None for a part that is not loaded."""
        if name.removeprefix("model.").startswith(tuple(f"{part}." for part in self.SKIP_PREFIXES)):
            return None
        for pattern, replacement in self.KEY_MAPPING:
            name = re.sub(pattern, replacement, name)
        return name

    def split_key(self, key: str) -> list[str]:
        """Return the weights that a file stores in one tensor, mostly only this one."""
        path, _, suffix = key.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        parts = self.FUSED_LAYERS.get(leaf)
        return [f"{parent}.{part}.{suffix}" for part in parts] if parts else [key]

    def path(self, role: str, *numbers: int) -> str:
        """Return the name of the layer with this role. numbers: of its block and expert, if any."""
        return self.ROLES[role][0].replace("*", "{}").format(*numbers)

    def layer(self, role: str, *numbers: int) -> nn.Module | None:
        """Return the layer with this role; None if this architecture, or this block, has none."""
        try:
            return self.get_submodule(self.path(role, *numbers))
        except (KeyError, AttributeError):
            return None

    def role(self, name: str) -> str:
        """Return the role of the layer whose weight or bias has this name."""
        layer = re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0])
        return {path: role for role, (path, _) in self.ROLES.items()}[layer]

    def is_transposed(self, name: str) -> bool:
        """Return whether Hugging Face's files store the tensor of this name as (in, out)."""
        return name.endswith("weight") and self.role(name) in self.TRANSPOSED

    def tie_weights(self) -> "Model":
        """Make the head and the token embedding one parameter, if the config ties them."""
        if self.config.tie_word_embeddings:
            embedding = self.layer("embedding")
            head = self.layer("head")
            head.weight = embedding.weight
            for name, tensor in embedding.named_buffers():  # of a quantised weight
                setattr(head, name, tensor)
        return self

    def rope_tables(self, length: int) -> list[torch.Tensor]:
        """Return the tables that `hidden` needs for positions below `length`; here none."""
        return []

    @property
    def n_kv_head(self) -> int:
        """Return the number of key-value heads in this process."""
        return self.local_n_kv_head or self.config.n_kv_head

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations, KV caches and all weights that are not quantised."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def forward(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        """Compute the logits for the token after each position of whole sequences.

        tokens: (B, T) ids, T from 1 to block_size. logits_to_keep: number of last positions, 0 for
        all; the head is the largest matrix of a small model, and generation needs only the last
        position. Returns (B, logits_to_keep or T, vocab_size), in the weights' dtype, or in float32
        with a soft cap. Raises UserError if T is out of range.
        """
        T, block_size = tokens.shape[1], self.config.block_size
        if not 1 <= T <= block_size:
            raise UserError(
                f"{T} tokens in one pass: must be between 1 and block_size ({block_size})"
            )
        positions = torch.arange(T, device=tokens.device)
        x = self.hidden(tokens, positions, self.causal_attention)  # (B, T, C)
        return self.head(x[:, -logits_to_keep:])

    def causal_attention(self, layer: int, q, k, v) -> torch.Tensor:
        """Call `causal_attention` with the layer's sliding window and the config's soft cap."""
        config = self.config
        own = layer_sliding_windows(config)[layer], config.attn_logit_softcapping
        return causal_attention(layer, q, k, v, *own)

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> "Model":
        """Initialise as GPT-2: normal, divided by sqrt(2 n_layer) where a residual branch ends."""
        for name, parameter in self.named_parameters():
            self.init_weight(name, parameter, std, generator)
        return self

    @torch.no_grad()
    def init_weight(self, name: str, weight: torch.Tensor, std: float = 0.02, generator=None):
        """Initialise one weight, which need not be in the model, and return it."""
        if name.endswith("bias"):
            return weight.zero_()
        if weight.dim() == 1:
            return weight.fill_(1.0)
        ends_branch = self.role(name) in ("attn_out", "down", "expert_down")
        scale = (2 * self.config.n_layer) ** -0.5 if ends_branch else 1.0
        return weight.normal_(std=std * scale, generator=generator)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, attend):
        qkv = self.c_attn(x).unflatten(-1, (3, -1, self.head_dim))  # (..., 3, n_head, head_dim)
        q, k, v = qkv.unbind(-3)
        return self.c_proj(attend(q, k, v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

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


class GPT(Model):
    ROLES = {
        "embedding": ("wte", "token_embd"),
        "positions": ("wpe", "position_embd"),
        "attn_norm": ("h.*.ln_1", "blk.*.attn_norm"),
        "qkv": ("h.*.attn.c_attn", "blk.*.attn_qkv"),
        "attn_out": ("h.*.attn.c_proj", "blk.*.attn_output"),
        "mlp_norm": ("h.*.ln_2", "blk.*.ffn_norm"),
        "up": ("h.*.mlp.c_fc", "blk.*.ffn_up"),
        "down": ("h.*.mlp.c_proj", "blk.*.ffn_down"),
        "norm": ("ln_f", "output_norm"),
        "head": ("lm_head", "output"),
    }
    BASE_MODEL_PREFIX = "transformer."
    TRANSPOSED = ("qkv", "attn_out", "up", "down")
    IGNORED_SUFFIXES = (
        "lm_head.weight",
        ".attn.bias",
        ".attn.masked_bias",
    )  # tied head, old causal masks

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # nn.Embedding(...) would initialise weights, and on the meta device the first call spends
        # a second on imports.
        tokens = torch.empty(config.vocab_size, config.n_embd)
        positions = torch.empty(config.block_size, config.n_embd)
        self.wte = nn.Embedding.from_pretrained(tokens, freeze=False)
        self.wpe = nn.Embedding.from_pretrained(positions, freeze=False)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        tables: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the last block's output at each position, (..., C).

        tokens: ids, of any shape that `attend` understands. positions: of each token in its
        sequence, 0 to block_size - 1, broadcastable to the shape of tokens. attend(layer, q, k, v):
        maps queries, keys and values of these positions, (..., heads, head_dim), to the attention
        output, of the shape of q. Only `attend` knows the KV cache, and which positions see
        which. tables: `rope_tables`; None: for these positions, which waits for a GPU.
        """
        x = self.wte(tokens) + self.wpe(positions)  # (..., C)
        for layer, block in enumerate(self.h):
            x = block(x, functools.partial(attend, layer))
        return x

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits for the token after each position: (..., C) to (..., vocab_size)."""
        return self.lm_head(self.ln_f(hidden))
