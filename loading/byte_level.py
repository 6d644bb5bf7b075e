"""Byte-level vocabularies: the patterns that split a text, and the spelling of its bytes."""

PATTERNS = {  # pre-tokenization: they split a text before bytes are merged
    # openai/gpt-2, encoder.py
    "GPT-2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Mistral Nemo and later
    "Tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def unicode_to_bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    GPT-2 writes a printable byte as itself and the others, in order, as the characters from U+0100
    on, so that no token contains white space (openai/gpt-2, encoder.py).
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


SUPPORTED_VALUES = {"decoder.type": ("ByteLevel",)}
BYTE_DECODER = unicode_to_bytes()
BYTE_ENCODER = {byte: character for character, byte in BYTE_DECODER.items()}


def token_to_bytes(token: str) -> bytes:
    """Return the bytes of a token; its own UTF-8 if a character stands for no byte."""
    return (
        bytes(map(BYTE_DECODER.get, token)) if BYTE_DECODER.keys() >= set(token) else token.encode()
    )


def bytes_to_tokens(data: bytes) -> list[str]:
    """Return the tokens that may spell these bytes: here one."""
    return ["".join(map(BYTE_ENCODER.get, data))]
