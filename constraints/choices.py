"""Output that is one of several strings: a trie over their tokens."""

import torch

from cache import common_prefix_length
from constraints.matcher import Matcher
from constraints.vocabulary import Vocabulary
from errors import UserError

END_OF_CHOICE = None  # key in a trie node where a choice ends


class ChoiceTrie:
    """Byte trie of choices; a node maps each byte that may come next to the child node.

    Raises UserError if a byte of a choice is not a token: decoding could get stuck before it.
    """

    def __init__(self, texts: tuple[str, ...], vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.root = {}
        missing = {byte for text in texts for byte in text.encode()}
        missing = bytes(sorted(byte for byte in missing if bytes([byte]) not in vocabulary.ids))
        if missing:
            raise UserError(f"choices: the vocabulary lacks these bytes: {missing.hex(' ')}")
        for text in texts:
            node = self.root
            for byte in text.encode():
                node = node.setdefault(byte, {})
            node[END_OF_CHOICE] = {}

    def matcher(self) -> "ChoiceMatcher":
        return ChoiceMatcher(self)

    def advance(self, node: dict | None, token: int) -> dict | None:
        """Return the node after a token; None if no choice has this prefix."""
        piece = self.vocabulary.pieces[token]
        for byte in piece or ():
            node = node.get(byte) if node else None
        return node if piece else None

    def next_token_ids(self, node: dict) -> list[int]:
        """Return the allowed token ids by looking up each string that may follow.

        A scan of the vocabulary would read 50,000 tokens; the strings are usually far fewer.
        """
        ids = list(self.vocabulary.eos_token_ids) if END_OF_CHOICE in node else []
        stack = [(node, b"")]
        while stack:
            node, string = stack.pop()
            for byte, child in node.items():
                if byte is not END_OF_CHOICE and len(string) < self.vocabulary.longest:
                    longer = string + bytes([byte])
                    ids += self.vocabulary.ids.get(longer, ())
                    stack.append((child, longer))
        return ids


class ChoiceMatcher(Matcher):
    """Matcher of a ChoiceTrie; keeps the node after each token, so that it can roll back."""

    def __init__(self, choices: ChoiceTrie):
        super().__init__(choices.vocabulary)
        self.choices = choices
        self.nodes = [choices.root]  # before the first token, and after each

    def token_mask(self, output: list[int]) -> torch.Tensor:
        known = common_prefix_length(self.tokens, output)
        del self.tokens[known:]
        del self.nodes[known + 1 :]
        for token in output[known:]:
            self.nodes.append(self.choices.advance(self.nodes[-1], token))
            self.tokens.append(token)
        node = self.nodes[-1]
        if node is None:
            return self.vocabulary.token_mask(slice(None))
        return self.vocabulary.token_mask(self.choices.next_token_ids(node))
