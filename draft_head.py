"""A draft head: one transformer block that reads the target's hidden states.

After EAGLE (Li et al. 2024, 2401.15077), with the reduced vocabulary of FR-Spec (Zhao et al. 2025,
2502.14856).
"""

import functools

import torch
import torch.nn as nn

from cache import Span
from llama import Block, Llama, LlamaConfig, RMSNorm, rotary_embedding
from model import Attend, Model, PassOutput


class DraftHeadRunner:
    """The torch backend of a draft head."""

    def forward(self, head, cache, spans: list[Span], states: torch.Tensor) -> PassOutput:
        """Run one pass over all spans, and return the output of each span's last token.

        cache: of the head. states: the hidden state that chose each token, (N, C), in the order of
        the spans. The logits cover the whole vocabulary.
        """
        tokens, positions, ends = cache.prepare(spans)
        rows = [row for span, end in zip(spans, ends) for row in range(end - len(span.tokens), end)]
        ordered = torch.empty_like(states)
        ordered[rows] = states
        x = head.hidden(tokens, positions, cache.attend, ordered.view(*tokens.shape, -1))
        x = x.flatten(0, -2)[[end - 1 for end in ends]]
        return PassOutput(head.head(x).float(), x)


class DraftHead(Model):
    """A block that predicts the target's next hidden state from the last one and the token chosen.

    The target embeds the token. Its final norm and rows of its head turn the prediction into
    logits. config: of the block. token_ids: the tokens that may be drafted.
    """

    runner = DraftHeadRunner()
    ROLES = {
        role: (path.replace("layers.*", "block"), "") for role, (path, _) in Llama.ROLES.items()
    }

    def __init__(self, config: LlamaConfig, token_ids: list[int], target: Model):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.fc = nn.Linear(2 * C, C, bias=False)
        self.embed_norm = RMSNorm(config)
        self.block = Block(config, 0)
        self.token_ids = torch.tensor(token_ids, device=target.device)
        lm_head = nn.Linear(C, len(token_ids), bias=False, device="meta")
        rows = head_rows(target, self.token_ids).to(target.dtype)
        lm_head.weight = nn.Parameter(rows, requires_grad=False)
        # A tuple, because the target's layers are no part of this module.
        self.target_layers = target.layer("embedding"), target.layer("norm"), lm_head

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, states: torch.Tensor
    ) -> torch.Tensor:
        """Return the predicted hidden state after each token, (..., C).

        states: the hidden state that chose each token, of the target or of this head, (..., C).
        Other arguments as in `GPT.hidden`.
        """
        embedding, norm, _ = self.target_layers
        tables = rotary_embedding(self.config, self.dtype, self.device)
        cos, sin = (table[positions] for table in tables.cos_sin(int(positions.max()) + 1))
        x = torch.cat([self.embed_norm(embedding(tokens)), norm(states)], dim=-1)  # (..., 2 C)
        return self.block(self.fc(x), cos, sin, functools.partial(attend, 0))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, (..., vocab_size), -inf for tokens that may not be drafted."""
        _, norm, lm_head = self.target_layers
        return self.scatter(lm_head(norm(hidden)))

    def scatter(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the whole vocabulary. logits: (..., len(token_ids))."""
        shape = *logits.shape[:-1], self.config.vocab_size
        return logits.new_full(shape, -torch.inf).index_copy_(-1, self.token_ids, logits)


@torch.no_grad()
def head_rows(target: Model, token_ids: torch.Tensor) -> torch.Tensor:
    """Return rows of the target's head, (n, C), whatever its quantisation."""
    if target.config.tie_word_embeddings:
        return target.layer("embedding")(token_ids)
    unit = torch.eye(target.config.n_embd, dtype=target.dtype, device=target.device)
    return torch.cat([target.layer("head")(part)[:, token_ids] for part in unit.split(64)]).t()
