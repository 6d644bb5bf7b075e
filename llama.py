"""Llama: the shape of one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are those of the embedded checkpoints/stories-llama."""

    vocab_size: int = 4096
    block_size: int = 256
    n_layer: int = 8
    n_head: int = 6
    n_kv_head: int = 2  # heads with keys and values, each for n_head / n_kv_head neighbouring ones
    head_dim: int = 32
    n_embd: int = 192
    n_inner: int = 512  # the width inside the MLP
    bos_token_id: int = 4095  # what an empty prompt starts from
    eos_token_ids: tuple[int, ...] = (4095,)
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0  # the slowest rotation makes about a radian in so many positions
    tied_head: bool = True
