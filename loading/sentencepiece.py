"""What SentencePiece's vocabularies are made of: characters, a sign for a blank, single bytes."""

from errors import UserError

BLANK = "▁"
# A character that the vocabulary lacks is written as the bytes of its UTF-8.
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
DECODER = [
    {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SUPPORTED = {"decoder.type": ("Sequence",), "pre_tokenizer.type": (None, "Metaspace", "Split")}
LONGEST = 512  # characters in a token; all ways to cut it are tried
MOST = 10**7  # characters in all merges: tokens a, aa, aaa, ... can be cut everywhere


def bytes_of(token: str) -> bytes:
    """What a token spells."""
    return BYTES.get(token) or token.replace(BLANK, " ").encode()


def tokens_of(data: bytes) -> list[str]:
    """The tokens that may spell these bytes."""
    text = data.decode("utf-8", "replace").replace(" ", BLANK)
    return [name for name in (text, f"<0x{data.hex().upper()}>") if bytes_of(name) == data]


def steps(begins_with_blank: bool) -> dict:
    """The parts of a tokenizer.json that write a text with these blanks, and back.

    begins_with_blank: one more stands before a text, and after each added token.
    """
    before = [{"type": "Prepend", "prepend": BLANK}] * begins_with_blank
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, blanks]},
        "decoder": {"type": "Sequence", "decoders": DECODER + [STRIP] * begins_with_blank},
    }


def merges_by_score(where, scores: dict[str, float]) -> list[list[str]]:
    """The pairs of tokens that are one token together, the one with the highest score first.

    SentencePiece has no list of merges: of all neighbours that are a token together it joins those
    whose token has the highest score. scores: of each token that a text may have. Raises UserError
    for a token that is too long, and for too many pairs.
    """
    pairs = []
    size = 0
    for token in sorted(scores, key=scores.get, reverse=True):
        if len(token) > LONGEST:
            raise UserError(f"{where}: token {token!r:.40}... has over {LONGEST} characters")
        for cut in range(1, len(token)):
            if token[:cut] in scores and token[cut:] in scores:
                pairs.append([token[:cut], token[cut:]])
                size += len(token)
        if size > MOST:
            raise UserError(f"{where}: the merges have over {MOST:,} characters")
    return pairs
