"""Constrained decoding: which tokens may come next, so that a text gets the form it must have."""

import functools

import torch

from cache import shared_length
from errors import UserError
from sampling import SamplingParams


class Vocabulary:
    """What each token writes.

    pieces: the bytes of each id; None for special tokens, those that end a text, and ids without
    text, because no text is made of them, even where a name spells one. ids: of each piece. ends:
    the ids that end a text. Raises UserError if there is none.
    """

    def __init__(self, encoding, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.encoding = encoding
        self.ends = [token for token in eos_token_ids if token < vocab_size]
        if not self.ends:
            raise UserError("this model has no token that ends a text, so no text is ever whole")
        silent = {encoding.added[name] for name in encoding.special_tokens_set} | set(self.ends)
        self.pieces: list[bytes | None] = [None] * vocab_size
        self.ids: dict[bytes, list[int]] = {}
        for token in set(range(vocab_size)) - silent:
            try:
                piece = encoding.decode_single_token_bytes(token)
            except KeyError:  # a padded vocabulary has ids without text
                continue
            if piece:  # an empty one could follow itself for ever
                self.pieces[token] = piece
                self.ids.setdefault(piece, []).append(token)
        self.longest = max(map(len, self.ids), default=0)  # bytes

    def mask(self, ids: list[int]) -> torch.Tensor:
        """(vocab_size,) bools: which tokens are among these."""
        mask = torch.zeros(len(self.pieces), dtype=torch.bool)
        mask[ids] = True
        return mask


END = None  # the key in a node of the trie that says: a choice ends here


class Choices:
    """Texts as a trie: a node maps each byte that may come next to the node after it.

    Raises UserError for a choice with bytes that no token is: a text could get stuck before one.
    """

    def __init__(self, texts: tuple[str, ...], vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.root = {}
        lacking = {byte for text in texts for byte in text.encode()}
        lacking = bytes(sorted(byte for byte in lacking if bytes([byte]) not in vocabulary.ids))
        if lacking:
            raise UserError(f"choices: the vocabulary lacks these bytes: {lacking.hex(' ')}")
        for text in texts:
            node = self.root
            for byte in text.encode():
                node = node.setdefault(byte, {})
            node[END] = {}

    def matcher(self) -> "ChoiceMatcher":
        return ChoiceMatcher(self)

    def after(self, node: dict | None, token: int) -> dict | None:
        """The node that a token leads to; None: no choice begins like this."""
        piece = self.vocabulary.pieces[token]
        for byte in piece or ():
            node = node.get(byte) if node else None
        return node if piece else None

    def following(self, node: dict) -> list[int]:
        """The tokens that may come next: each string that follows is looked up in the vocabulary.

        A scan of the vocabulary would read 50,000 tokens; the strings are hardly ever as many.
        """
        ids = list(self.vocabulary.ends) if END in node else []
        waiting = [(node, b"")]
        while waiting:
            node, string = waiting.pop()
            for byte, child in node.items():
                if byte is not END and len(string) < self.vocabulary.longest:
                    longer = string + bytes([byte])
                    ids += self.vocabulary.ids.get(longer, ())
                    waiting.append((child, longer))
        return ids


class ChoiceMatcher:
    """Says which tokens may follow a text. It keeps a node for each token, so it can go back."""

    def __init__(self, choices: Choices):
        self.choices = choices
        self.tokens = []
        self.nodes = [choices.root]  # before the first token, and after each

    def allowed(self, output: list[int]) -> torch.Tensor:
        """Which tokens may follow this output of a text, (vocab_size,) bools.

        It may be any output: what it shares with that of the last call is not read again. After
        one that has left the form all are allowed: a draft that will be refused, or an EOS.
        """
        known = shared_length(self.tokens, output)
        del self.tokens[known:]
        del self.nodes[known + 1 :]
        for token in output[known:]:
            self.nodes.append(self.choices.after(self.nodes[-1], token))
            self.tokens.append(token)
        node = self.nodes[-1]
        vocabulary = self.choices.vocabulary
        if node is None:
            return torch.ones(len(vocabulary.pieces), dtype=torch.bool)
        return vocabulary.mask(self.choices.following(node))

    def is_whole(self, output: list[int]) -> bool:
        """Whether an output has ended, or may end where it is cut."""
        ends = self.choices.vocabulary.ends
        return output[-1:] in [[end] for end in ends] or self.allowed(output)[ends[0]].item()


@functools.lru_cache(4)
def vocabulary_of(encoding, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The Vocabulary of an encoding, made once."""
    return Vocabulary(encoding, vocab_size, eos_token_ids)


compile_choices = functools.lru_cache(8)(Choices)  # a request has several texts


def compile_constraint(params: SamplingParams, vocabulary: Vocabulary) -> Choices | None:
    """The form that these parameters ask for; None for any. Raises UserError as `Choices`."""
    return compile_choices(params.choices, vocabulary) if params.choices else None


def make_matcher(params: SamplingParams, encoding, config) -> ChoiceMatcher | None:
    """A matcher for a text with these parameters; None if it may be any text.

    config: of the model. Raises UserError as `compile_constraint`, and if there is no encoding.
    """
    if not params.choices:
        return None
    if encoding is None:
        raise UserError("choices are texts, so they need an encoding")
    vocabulary = vocabulary_of(encoding, config.vocab_size, tuple(config.eos_token_ids))
    return compile_constraint(params, vocabulary).matcher()
