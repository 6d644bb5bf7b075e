"""Loading and saving draft heads: config.json and model.safetensors in a directory."""

from pathlib import Path

import torch

from draft_head import DraftHead
from errors import UserError
from llama import LlamaConfig
from loading.checkpoint import check_values, read_json, read_tensors, write_checkpoint
from loading.config import LLAMA_SIZES, check_heads, read_number, read_sizes, read_token_ids
from loading.load import is_file
from model import Model

MODEL_TYPE = "draft_head"
TARGET_SIZES = ("n_embd", "vocab_size")  # the head's are the target's
SIZES = {field: LLAMA_SIZES[field] for field in ("n_head", "n_kv_head", "head_dim", "n_inner")}
SIZES["window"] = "sliding_window", 10**7


def is_draft_head(directory) -> bool:
    """Return whether a directory holds a draft head, by its config.json."""
    file = Path(directory) / "config.json"
    return is_file(file) and read_json(file).get("model_type") == MODEL_TYPE


def load_draft_head(directory, target: Model) -> DraftHead:
    """Load a draft head for a target, in the dtype of the target's activations.

    Raises UserError for damaged files, and for a head of a target with other sizes.
    """
    file = Path(directory) / "config.json"
    raw = read_json(file)
    check_values(file, raw, {"model_type": (MODEL_TYPE,)})
    config = target.config
    shared = {field: getattr(config, field) for field in TARGET_SIZES}
    for field, size in shared.items():
        key, _ = LLAMA_SIZES[field]
        if raw.get(key) != size:
            raise UserError(f"{file}: {key} {raw.get(key)!r}: must be the target's ({size})")
    sizes = read_sizes(file, raw, SIZES, {})
    check_heads(file, sizes, LLAMA_SIZES)
    head_config = LlamaConfig(
        sliding_windows=(sizes.pop("window"),),
        **sizes | shared,
        block_size=config.block_size,
        n_layer=1,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        norm_eps=config.norm_eps,
        rope_theta=read_number(file, raw, "rope_theta", None, 1e12),
    )
    token_ids = read_token_ids(file, raw, "token_ids", config.vocab_size, None)
    head = DraftHead(head_config, list(token_ids), target).to(target.device, target.dtype)
    weights = dict(head.named_parameters())
    shapes = {name: weight.shape for name, weight in weights.items()}
    with torch.no_grad():
        for name, rows, chunk in read_tensors([file.with_name("model.safetensors")], shapes):
            weights[name][rows] = chunk
    return head.eval()


def save_draft_head(head: DraftHead, directory) -> None:
    """Write a draft head's config.json and model.safetensors, in the weights' dtype."""
    config = head.config
    (window,) = config.sliding_windows
    sizes = {"window": window} | {field: getattr(config, field) for field in LLAMA_SIZES}
    keys = SIZES | {field: LLAMA_SIZES[field] for field in TARGET_SIZES}
    fields = {"model_type": MODEL_TYPE, "rope_theta": config.rope_theta}
    fields |= {key: sizes[field] for field, (key, _) in keys.items()}
    fields["token_ids"] = head.token_ids.tolist()
    tensors = {name: weight.detach().contiguous() for name, weight in head.named_parameters()}
    write_checkpoint(Path(directory), fields, tensors)
