"""llama.cpp as a reference for benchmarks.batching."""

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
    """

    def __init__(self, file: Path):
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # ERROR shows warnings
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.api = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), options)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def run(self, prompts: list[list[int]], length: int, device: str) -> tuple[list, float, float]:
        """Run prompts of equal length, and return what `benchmarks.batching.run` returns."""
        with self.decoder(len(prompts), len(prompts[0]) + length) as decode:
            return common.timed(greedy(decode, prompts, length), device)

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Return what `benchmarks.batching.log_probs` returns, computed one token at a time."""
        with self.decoder(1, len(tokens)) as decode:
            logits = [torch.tensor(decode([[token]], at)) for at, token in enumerate(tokens)]
        return torch.cat(logits).log_softmax(dim=-1)

    @contextlib.contextmanager
    def decoder(self, num_seqs: int, positions: int):
        """Yield a `decode` function with a new cache of `num_seqs` sequences.

        decode(new, position): appends the new tokens of each sequence from that position on, and
        returns the logits after the last, (num_seqs, vocab_size), valid until the next call.
        positions: maximum per sequence.
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
        context = api.llama_init_from_model(self.model, options)
        if not context:
            raise UserError(
                f"llama.cpp refuses batch size {num_seqs} with {positions} positions per sequence"
            )
        batch = api.llama_batch_init(num_seqs * positions, 0, 1)

        def decode(new: list[list[int]], position: int):
            batch.n_tokens = 0
            for seq_id, tokens in enumerate(new):
                for at, token in enumerate(tokens, start=position):
                    index = batch.n_tokens
                    batch.token[index] = token
                    batch.pos[index] = at
                    batch.n_seq_id[index] = 1
                    batch.seq_id[index][0] = seq_id
                    batch.logits[index] = False
                    batch.n_tokens += 1
                batch.logits[index] = True
            if error := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode: {error}")
            logits = api.llama_get_logits(context)
            return numpy.ctypeslib.as_array(logits, shape=(num_seqs, self.vocab_size))

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
