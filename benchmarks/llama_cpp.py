"""llama.cpp as a reference for benchmarks.batching and benchmarks.quality."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import common
from errors import UserError


class LlamaCpp:
    """A GGUF file's model, computed by llama.cpp on the CPU, through its C API.

    With its own defaults: the cache is float16, whatever the weights are. With a float32 one, and
    without flash attention, a Llama's log-probabilities are ours but for 2e-5, and 32 rows take
    twice the time.
    Raises UserError for a file that it does not load.
    """

    def __init__(self, file: Path):
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # ERROR: with warnings
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.api = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), options)
        if not self.model:
            raise UserError(f"{file}: llama.cpp does not load it")
        self.weight_bytes = llama_cpp.llama_model_size(self.model)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def close(self) -> None:
        """Give the weights' memory back."""
        self.api.llama_model_free(self.model)

    def run(self, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
        """Run prompts of equal length, and return what `benchmarks.batching.run` returns."""
        with self.decoder(len(prompts), len(prompts[0]) + length) as decode:
            return common.timed(greedy(decode, prompts, length), device)

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities, as of `benchmarks.batching.log_probs`, one token at a time."""
        with self.decoder(1, len(tokens)) as decode:
            logits = [torch.tensor(decode([[token]], at)) for at, token in enumerate(tokens)]
        return torch.cat(logits).log_softmax(dim=-1)

    def logits(self, tokens: list[int], pass_size: int) -> Iterator[torch.Tensor]:
        """The logits after each token, (n, vocab_size), of `pass_size` tokens at a time.

        The cache is float32, so that what is off comes from the weights and their products.
        """
        with self.decoder(1, len(tokens), exact_cache=True) as decode:
            for start in range(0, len(tokens), pass_size):
                yield torch.tensor(
                    decode([tokens[start : start + pass_size]], start, all_logits=True)
                )

    @contextlib.contextmanager
    def decoder(self, num_seqs: int, positions: int, exact_cache: bool = False):
        """A function that decodes so many sequences of at most so many positions with a new cache.

        decode(new, position, all_logits=False): new tokens of each row, the first of them at that
        position, to the logits after the last, (num_seqs, vocab_size), until the next call.
        all_logits: after each of them, (num_seqs * tokens, vocab_size).
        exact_cache: it is float32, and attention is not llama.cpp's flash attention.
        Raises UserError if llama.cpp refuses so much.
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
            raise UserError(f"llama.cpp takes no {num_seqs} texts of {positions} tokens at once")
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
    """Steps of one token a prompt. decode: as of `LlamaCpp.decoder`."""
    new = prompts
    position = 0
    for _ in range(length):
        step = decode(new, position).argmax(axis=-1).tolist()
        yield step
        position += len(new[0])
        new = [[token] for token in step]
