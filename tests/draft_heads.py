"""Draft heads of random weights."""

import torch

from draft_head import DraftHead
from llama import LlamaConfig

SHAPE = {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "head_dim": 6, "n_inner": 24}


def head_of(target, token_ids=None, seed=0, window=3):
    """Return a random head for a target.

    token_ids: that it may draft, a number for those below it; None: every second.
    """
    config = target.config
    size = config.vocab_size
    own = LlamaConfig(
        **SHAPE,
        vocab_size=size,
        n_embd=config.n_embd,
        block_size=config.block_size,
        norm_eps=config.norm_eps,
        eos_token_ids=config.eos_token_ids,
        sliding_windows=(window,),
    )
    if isinstance(token_ids, int):
        token_ids = range(token_ids)
    head = DraftHead(own, list(token_ids or range(0, size, 2)), target)
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.3, generator=generator)
    return head.to(target.device, target.dtype)
