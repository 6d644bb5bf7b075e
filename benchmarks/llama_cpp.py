"""llama.cpp as a reference for benchmarks.batching and benchmarks.quality."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import common
from errors import UserError


class LlamaCpp:
    """A GGUF model that llama.cpp computes on the CPU, through its C API.

    llama.cpp's defaults apply, so the cache is float16 with any weights. With a float32 cache and
    without flash attention, a Llama's log-probabilities are ours to within 2e-5, and 32 sequences
    take twice the time.
    Raises UserError for a file that llama.cpp does not load.
    """

    def __init__(self, file: Path):
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # ERROR shows warnings
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.api = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), options)
        if not self.model:
            raise UserError(f"{file}: llama.cpp cannot load this file")
        self.weight_bytes = llama_cpp.llama_model_size(self.model)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def close(self) -> None:
        """Free the memory of the weights."""
        self.api.llama_model_free(self.model)

    def run(self, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
        """Run prompts of equal length, and return what `benchmarks.batching.run` returns."""
        with self.decoder(len(prompts), len(prompts[0]) + length) as decode:
            return common.timed(greedy(decode, prompts, length), device)

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Return what `benchmarks.batching.log_probs` returns, computed one token at a time."""
        with self.decoder(1, len(tokens)) as decode:
            logits = [torch.tensor(decode([[token]], at)) for at, token in enumerate(tokens)]
        return torch.cat(logits).log_softmax(dim=-1)

    def logits(self, tokens: list[int], pass_size: int) -> Iterator[torch.Tensor]:
        """Yield the logits after each token, (n, vocab_size), `pass_size` tokens at a time.

        The cache is float32, so that errors come only from the weights and their products.
        """
        with self.decoder(1, len(tokens), exact_cache=True) as decode:
            for start in range(0, len(tokens), pass_size):
                yield torch.tensor(
                    decode([tokens[start : start + pass_size]], start, all_logits=True)
                )

    @contextlib.contextmanager
    def decoder(self, num_seqs: int, positions: int, exact_cache: bool = False):
        """Yield a `decode` function with a new cache of `num_seqs` sequences.

        decode(new, position, all_logits=False): appends the new tokens of each sequence from that
        position on, and returns the logits after the last, (num_seqs, vocab_size), valid until the
        next call. all_logits: after each token, (num_seqs * tokens, vocab_size).
        positions: maximum per sequence. exact_cache: float32, without llama.cpp's flash attention.
        Raises UserError if llama.cpp refuses this size.
        """
        import numpy

        api = self.api
        options = api.llama_context_default_params()
        options.n_seq_max = num_seqs
        options.n_ctx = num_seqs * positions
        options.n_batch = num_seqs * positions
        options.n_threads = torch.get_num_threads()
        options.n_threads_batch = torch.get_num_threads()
        if exact_cache:
            options.type_k = api.GGML_TYPE_F32
            options.type_v = api.GGML_TYPE_F32
            options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = api.llama_init_from_model(self.model, options)
        if not context:
            raise UserError(
                f"llama.cpp refuses batch size {num_seqs} with {positions} positions per sequence"
            )
        batch = api.llama_batch_init(num_seqs * positions, 0, 1)

        def decode(new: list[list[int]], position: int, all_logits: bool = False):
            batch.n_tokens = 0
            for seq_id, tokens in enumerate(new):
                for at, token in enumerate(tokens, start=position):
                    index = batch.n_tokens
                    batch.token[index] = token
                    batch.pos[index] = at
                    batch.n_seq_id[index] = 1
                    batch.seq_id[index][0] = seq_id
                    batch.logits[index] = all_logits
                    batch.n_tokens += 1
                batch.logits[index] = True
            if error := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode: {error}")
            logits = api.llama_get_logits(context)
            shape = batch.n_tokens if all_logits else num_seqs, self.vocab_size
            return numpy.ctypeslib.as_array(logits, shape=shape)

        try:
            yield decode
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)


def greedy(decode, prompts: list[list[int]], length: int) -> Iterator[list[int]]:
    """Yield greedy steps of one token per prompt. decode: from `LlamaCpp.decoder`."""
    new = prompts
    position = 0
    for _ in range(length):
        step = decode(new, position).argmax(axis=-1).tolist()
        yield step
        position += len(new[0])
        new = [[token] for token in step]
