"""GPT-2 in one file: the forward pass written out, weights in the form that Hugging Face files have.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters are named as in transformers'
GPT-2, so its files load unchanged. In the shape comments B is the batch, T the positions, C the width (`n_embd`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2; the defaults are those of the 124 M parameter model."""

    vocab_size: int = 50257
    block_size: int = 1024  # the context window, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    eos_token_id: int = 50256
    layer_norm_epsilon: float = 1e-5


PRESETS = {
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, n_head, T, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


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

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # Not nn.Embedding(...): that draws random weights, and on the meta device the first draw imports for a second.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.block_size, config.n_embd), freeze=False)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        """Logits for the token after each position.

        tokens: (B, T) ids, T from 1 to block_size. logits_to_keep: only the last so many positions, 0 for all; the
        head is the largest matrix of a small model, and generation needs its product with the last position only.
        Returns (B, logits_to_keep or T, vocab_size), in the weights' dtype. Raises ValueError if T is out of range.
        """
        T = tokens.shape[1]
        if not 1 <= T <= self.config.block_size:
            raise ValueError(f"{T} tokens in one pass; this model takes 1 to block_size = {self.config.block_size}")
        x = self.wte(tokens) + self.wpe.weight[:T]  # (B, T, C)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x[:, -logits_to_keep:]), self.wte.weight)  # the head is the embedding, transposed

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> "GPT":
        """GPT-2's initialisation: normal weights, those that end a residual branch smaller by sqrt(2 n_layer)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = (2 * self.config.n_layer) ** -0.5 if "c_proj" in name else 1.0
                parameter.normal_(std=std * scale, generator=generator)
        return self

    @classmethod
    def from_pretrained(cls, name, dtype: torch.dtype = torch.float32, device="cpu") -> "GPT":
        """Load a model for inference, straight to its dtype and device.

        name: a directory in Hugging Face form (`config.json` and `model.safetensors`); `gpt2`, `gpt2-medium`,
        `gpt2-large` or `gpt2-xl`, fetched from the hub; or `random:gpt2` (or another of these), that shape with
        random weights. Raises ValueError, in one line that says what is wrong, for anything else.
        """
        name = str(name)
        if (shape := name.removeprefix("random:")) != name and shape in PRESETS:
            with torch.device("meta"):
                model = cls(PRESETS[shape])
            seeded = torch.Generator(device).manual_seed(0)  # the same weights in each process
            return model.to(dtype).to_empty(device=device).init_weights(generator=seeded).eval()
        directory = find_checkpoint(name)
        with torch.device("meta"):
            model = cls(read_config(directory / "config.json"))
        weights = read_weights(directory / "model.safetensors", model.state_dict(), dtype, device)
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def save_pretrained(self, directory) -> None:
        """Write `config.json` and `model.safetensors`, in the weights' dtype; transformers reads them too."""
        directory, config = Path(directory), self.config
        directory.mkdir(parents=True, exist_ok=True)
        fields = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "layer_norm_epsilon": config.layer_norm_epsilon,
            "activation_function": "gelu_new",
            "bos_token_id": config.eos_token_id,
            "eos_token_id": config.eos_token_id,
            "dtype": str(self.wte.weight.dtype).removeprefix("torch."),
        }
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
        weights = {
            name: (tensor.t() if is_conv1d(name) else tensor).contiguous() for name, tensor in self.state_dict().items()
        }
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def is_conv1d(name: str) -> bool:
    """Whether files hold this weight as (in, out): GPT-2's linear layers were 1x1 convolutions once."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def find_checkpoint(name: str) -> Path:
    """The directory that `name` means, fetched from the hub if need be. Raises ValueError if there is none."""
    directory = Path(name)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(f"{directory}: no config.json in this directory")
        if not (directory / "model.safetensors").is_file():
            hint = ""
            if (directory / "pytorch_model.bin").is_file():
                hint = (
                    "; pytorch_model.bin is a pickle, which can run any code, and is not read: convert it with"
                    " transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
                )
            raise ValueError(f"{directory}: no model.safetensors in this directory{hint}")
        return directory
    if name not in PRESETS:
        raise ValueError(
            f"unknown model {name!r}: give a directory with config.json and model.safetensors, one of"
            f" {', '.join(PRESETS)} (from the Hugging Face hub), or random: before one of these"
        )
    from huggingface_hub import hf_hub_download, logging  # here: importing it takes longer than loading a small model

    logging.set_verbosity_error()  # one error at the end says what a warning for each retry would
    try:
        for file in ("config.json", "model.safetensors"):
            path = hf_hub_download(f"openai-community/{name}", file)
    except Exception as error:  # offline, refused, disk full: the hub's own errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name} could not be fetched from the Hugging Face hub: {reason}") from None
    return Path(path).parent


def read_config(file: Path) -> GPTConfig:
    """The GPTConfig in a Hugging Face `config.json`. Raises ValueError if it describes another architecture."""
    try:
        raw = json.loads(file.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError
    except ValueError:
        raise ValueError(f"{file}: not a JSON object") from None
    default, n_embd = GPTConfig(), raw.get("n_embd", GPTConfig.n_embd)
    only = {  # what this forward pass computes; the first value is what a missing key means
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * n_embd if isinstance(n_embd, int) else None),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    for key, allowed in only.items():
        if raw.get(key, allowed[0]) not in allowed:
            choices = " or ".join(repr(value) for value in allowed if value is not None)
            raise ValueError(f"{file}: {key} is {raw[key]!r}; supported is {choices}")
    fields = {name: raw.get(name, getattr(default, name)) for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    fields["block_size"] = raw.get("n_positions", default.block_size)
    for key, value in fields.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {key} is {value!r}; it must be a positive integer")
    eos_token_id = raw.get("eos_token_id", default.eos_token_id)
    if type(eos_token_id) is not int or not 0 <= eos_token_id < fields["vocab_size"]:
        raise ValueError(f"{file}: eos_token_id is {eos_token_id!r}; it must be an id below {fields['vocab_size']}")
    if fields["n_embd"] % fields["n_head"]:
        raise ValueError(f"{file}: n_embd {fields['n_embd']} is not a multiple of n_head {fields['n_head']}")
    epsilon = raw.get("layer_norm_epsilon", default.layer_norm_epsilon)
    if type(epsilon) not in (int, float) or not epsilon > 0:
        raise ValueError(f"{file}: layer_norm_epsilon is {epsilon!r}; it must be a number > 0")
    return GPTConfig(**fields, eos_token_id=eos_token_id, layer_norm_epsilon=epsilon)


def read_weights(file: Path, expected: dict, dtype: torch.dtype, device) -> dict:
    """The tensors of a safetensors file by parameter name, converted one by one, so that no second copy of the model
    exists. Files come with and without the prefix `transformer.`; some hold the head again, or old mask buffers.

    expected: parameter name -> tensor of the right shape. Raises ValueError for a file that is cut short, lacks a
    tensor, has one too many or one of another shape.
    """
    weights = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = {key.removeprefix("transformer."): key for key in tensors.keys()}
            for name, parameter in expected.items():
                if name not in stored:
                    raise ValueError(f"{file}: tensor {name} is missing")
                tensor = tensors.get_tensor(stored.pop(name)).to(device=device, dtype=dtype)
                if is_conv1d(name) and tensor.dim() == 2:
                    tensor = tensor.t().contiguous()
                if tensor.shape != parameter.shape:
                    shapes = f"{tuple(tensor.shape)}, and config.json says {tuple(parameter.shape)}"
                    raise ValueError(f"{file}: tensor {name} is {shapes}")
                weights[name] = tensor
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from None
    for name in stored:
        if name != "lm_head.weight" and not name.endswith((".attn.bias", ".attn.masked_bias")):
            raise ValueError(f"{file}: unexpected tensor {name}")
    return weights
