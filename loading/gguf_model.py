"""A GGUF file's configuration, and the names of its tensors."""

import re
import reprlib

from errors import UserError
from llama import LlamaConfig
from loading.checkpoint import check_values
from loading.config import check_heads, read_attention_sizes, read_number, read_token_ids
from loading.gguf import GGUF, TensorInfo
from model import GPTConfig, Model

ARCHITECTURES = ("gpt2", "qwen2", "qwen3")
SIZES = {  # field of a config -> its key after the architecture's name, and the largest value read
    "block_size": ("context_length", 10**7),
    "n_layer": ("block_count", 1000),
    "n_head": ("attention.head_count", 1000),
    "n_kv_head": ("attention.head_count_kv", 1000),
    "n_embd": ("embedding_length", 10**5),
    "n_inner": ("feed_forward_length", 10**6),
    "head_dim": ("attention.key_length", 1000),
}
EOS_KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def read_gguf_config(gguf: GGUF) -> GPTConfig | LlamaConfig:
    """Return the configuration of a file's model. Raises UserError for other architectures."""
    file = gguf.file
    raw = gguf.metadata
    architecture = raw.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{file}: general.architecture is {reprlib.repr(architecture)}; supported are {known}"
        )
    check_values(file, raw, {"split.count": (0, 1), f"{architecture}.rope.scaling.factor": (1,)})
    fields = read_attention_sizes(file, raw, prefixed(SIZES, architecture))
    fields["vocab_size"] = get_tensor(gguf, "token_embd.weight").shape[0]
    eos_ids = [raw[key] for key in EOS_KEYS if key in raw]
    eos_ids = read_token_ids(file, {EOS_KEYS[0]: eos_ids}, EOS_KEYS[0], fields["vocab_size"], None)
    fields["eos_token_ids"] = eos_ids
    build_config = gpt_config if architecture == "gpt2" else llama_config
    return build_config(gguf, architecture, fields)


def prefixed(sizes: dict[str, tuple[str, int]], architecture: str) -> dict[str, tuple[str, int]]:
    """Return sizes for `read_sizes` with the architecture's name before each key."""
    return {field: (f"{architecture}.{key}", limit) for field, (key, limit) in sizes.items()}


def gpt_config(gguf: GGUF, architecture: str, fields: dict) -> GPTConfig:
    epsilon = f"{architecture}.attention.layer_norm_epsilon"
    fields["layer_norm_epsilon"] = read_number(gguf.file, gguf.metadata, epsilon, None, 1)
    n_head = fields["n_head"]
    width = fields["n_embd"]
    sizes = fields.pop("n_kv_head"), fields.pop("head_dim"), fields.pop("n_inner")
    expected = n_head, width / n_head, 4 * width
    if sizes != expected:
        keys = "attention.head_count_kv, attention.key_length and feed_forward_length"
        raise UserError(f"{gguf.file}: {keys} {sizes}: must be {expected} in a GPT-2")
    return GPTConfig(**fields)


def llama_config(gguf: GGUF, architecture: str, fields: dict) -> LlamaConfig:
    file = gguf.file
    raw = gguf.metadata
    check_heads(file, fields, prefixed(SIZES, architecture))
    head_dim = fields["head_dim"]
    supported = {"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)}
    supported |= {"rope.scaling.type": ("none",), "rope.scale_linear": (1,), "expert_count": (0,)}
    check_values(file, raw, {f"{architecture}.{key}": each for key, each in supported.items()})
    eos_id = fields["eos_token_ids"][0]
    bos = read_token_ids(file, raw, "tokenizer.ggml.bos_token_id", fields["vocab_size"], eos_id)
    epsilon = f"{architecture}.attention.layer_norm_rms_epsilon"
    return LlamaConfig(
        **fields,
        bos_token_id=bos[0],
        norm_eps=read_number(file, raw, epsilon, None, 1),
        rope_theta=read_number(file, raw, f"{architecture}.rope.freq_base", 10000.0, 1e12),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tie_word_embeddings="output.weight" not in gguf.tensors,
    )


def get_tensor(gguf: GGUF, name: str) -> TensorInfo:
    """Return a tensor by its name. Raises UserError if it is missing."""
    if name not in gguf.tensors:
        raise UserError(f"{gguf.file}: tensor {name} is missing")
    return gguf.tensors[name]


def gguf_name(model: Model, key: str) -> str:
    """Return the GGUF name of a model's tensor."""
    layer, _, suffix = key.rpartition(".")
    numbers = iter(re.findall(r"(?<=\.)\d+(?=\.|$)", layer))
    name = re.sub(r"\*", lambda star: next(numbers), model.ROLES[model.role(key)][1])
    return f"{name}.{suffix}"
