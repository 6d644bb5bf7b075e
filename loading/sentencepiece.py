"""SentencePiece vocabularies: characters, a symbol for the space, and byte tokens."""

from errors import UserError

METASPACE = "▁"
# Byte fallback: a character outside the vocabulary becomes the bytes of its UTF-8.
BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
DECODER = [
    {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SUPPORTED_VALUES = {
    "decoder.type": ("Sequence",),
    "pre_tokenizer.type": (None, "Metaspace", "Split"),
}
MAX_TOKEN_LENGTH = 512  # characters in a token; all splits are tried
MAX_MERGED_CHARACTERS = 10**7  # tokens a, aa, aaa, ... can be split everywhere


def token_to_bytes(token: str) -> bytes:
    """Return the bytes that a token spells."""
    return BYTE_TOKENS.get(token) or token.replace(METASPACE, " ").encode()


def bytes_to_tokens(data: bytes) -> list[str]:
    """Return the tokens that may spell these bytes."""
    text = data.decode("utf-8", "replace").replace(" ", METASPACE)
    return [name for name in (text, f"<0x{data.hex().upper()}>") if token_to_bytes(name) == data]


def pipeline_steps(add_prefix_space: bool) -> dict:
    """Return the normalizer and decoder of a tokenizer.json that replace spaces, and restore them.

    add_prefix_space: put one more before a text, and after each added token.
    """
    before = [{"type": "Prepend", "prepend": METASPACE}] * add_prefix_space
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, blanks]},
        "decoder": {"type": "Sequence", "decoders": DECODER + [STRIP] * add_prefix_space},
    }


def merges_from_scores(where, scores: dict[str, float]) -> list[list[str]]:
    """Return the pairs of tokens that form a token, by descending score of that token.

    SentencePiece has no list of merges: it always joins the neighbours whose joint token has the
    highest score. scores: token -> score, of all tokens that a text may have. Raises UserError for
    a token that is too long, and for too many pairs.
    """
    pairs = []
    size = 0
    for token in sorted(scores, key=scores.get, reverse=True):
        if len(token) > MAX_TOKEN_LENGTH:
            raise UserError(
                f"{where}: token {token!r:.40}... is longer than {MAX_TOKEN_LENGTH} characters"
            )
        for split in range(1, len(token)):
            if token[:split] in scores and token[split:] in scores:
                pairs.append([token[:split], token[split:]])
                size += len(token)
        if size > MAX_MERGED_CHARACTERS:
            raise UserError(
                f"{where}: the merges have more than {MAX_MERGED_CHARACTERS:,} characters"
            )
    return pairs
