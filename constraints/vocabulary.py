"""Tokens of a model as bytes, and the tokenizer that llguidance asks."""

import functools

import numpy
import torch

from errors import UserError


class Vocabulary:
    """Token ids and their bytes, for constraints.

    pieces: bytes of each id; None for special tokens, EOS and ids without text, because constrained
    output never contains them, even if their names would fit. ids: token ids of each piece.
    eos_token_ids: ids that end a sequence. Raises UserError if there is none.
    """

    def __init__(self, encoding, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.encoding = encoding
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        if not self.eos_token_ids:
            raise UserError("the model has no EOS token, so constrained output could never end")
        special = {encoding.added_token_ids[name] for name in encoding.special_tokens_set} | set(
            self.eos_token_ids
        )
        self.pieces: list[bytes | None] = [None] * vocab_size
        self.ids: dict[bytes, list[int]] = {}
        for token in set(range(vocab_size)) - special:
            try:
                piece = encoding.decode_single_token_bytes(token)
            except KeyError:  # a padded vocabulary has ids without text
                continue
            if piece:  # an empty piece could repeat for ever
                self.pieces[token] = piece
                self.ids.setdefault(piece, []).append(token)
        self.longest = max(map(len, self.ids), default=0)  # bytes

    @functools.cached_property
    def usable_tokens(self) -> numpy.ndarray:
        """Return a bitmask, padded to int32, of EOS and all tokens with bytes."""
        texts = [token for token, piece in enumerate(self.pieces) if piece is not None]
        return self.bitmask(texts + self.eos_token_ids)

    @functools.cached_property
    def usable_tokens_in_tool_calls(self) -> numpy.ndarray:
        """Return `usable_tokens` plus the added tokens, which tool-call grammars name."""
        return self.usable_tokens | self.bitmask([*self.added_tokens.values()])

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Return the ids of added tokens by name, without EOS."""
        named = {
            name: self.encoding.added_token_ids[name] for name in self.encoding.special_tokens_set
        }
        return {name: token for name, token in named.items() if token not in self.eos_token_ids}

    @functools.cached_property
    def tokenizer(self):
        """Return this vocabulary as an llguidance tokenizer."""
        # Imported here, because it takes time and only constraints need it.
        from llguidance import LLTokenizer, TokenizerWrapper

        adapter = TokenizerAdapter(self, [piece or b"" for piece in self.pieces])
        for name, token in self.added_tokens.items():  # llguidance tells them apart by name
            adapter.tokens[token] = name.encode()
        return LLTokenizer(TokenizerWrapper(adapter), len(self.pieces), self.eos_token_ids)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without SentencePiece's leading space.

        Falls back to the longest tokens first if the tokenizer does not reproduce the text, for
        example because it lacks a byte.
        """
        data = text.encode()
        try:
            tokens = self.encoding.encode_ordinary(text, at_start=False)
            pieces = [self.pieces[token] for token in tokens]
            if b"".join(pieces) == data:
                return tokens
            if b"".join(pieces) == b" " + data:
                return self.tokenize_longest_first(pieces[0][1:]) + tokens[1:]
        except (UserError, TypeError):  # the tokenizer fails, or emits a token without a piece
            pass
        return self.tokenize_longest_first(data)

    def tokenize_longest_first(self, data: bytes) -> list[int]:
        """Tokenize bytes greedily, the longest token first; stop at a byte the vocabulary lacks."""
        tokens = []
        while data:
            sizes = range(min(self.longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self.ids), None)
            if size is None:
                break
            tokens.append(self.ids[data[:size]][0])
            data = data[size:]
        return tokens

    def bitmask(self, ids: list[int]) -> numpy.ndarray:
        """Return a bitmask with the bits of these ids set, one bit per token, padded to int32."""
        token_mask = torch.nn.functional.pad(self.token_mask(ids), (0, -len(self.pieces) % 32))
        return numpy.packbits(token_mask.numpy(), bitorder="little")

    def token_mask(self, ids: list[int] | slice) -> torch.Tensor:
        """Return (vocab_size,) bools: true for these ids."""
        token_mask = torch.zeros(len(self.pieces), dtype=torch.bool)
        token_mask[ids] = True
        return token_mask


MAX_TOKENIZED = 2**9  # characters; a schema can force 65,536, a grammar more


class TokenizerAdapter:
    """Vocabulary under the attribute names that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, pieces: list[bytes]):
        self.tokenize = functools.lru_cache(2**10)(vocabulary.tokenize)  # sequences share texts
        self.tokens = pieces
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        # llguidance passes the whole forced text before each token, and needs only its first token.
        return self.tokenize(text[:MAX_TOKENIZED])


@functools.lru_cache(4)
def get_vocabulary(encoding, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Return the Vocabulary of an encoding, cached."""
    return Vocabulary(encoding, vocab_size, eos_token_ids)
