"""GGUF files, byte by byte."""

import struct


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def file_of(*values: bytes, tensors=(), version=3, counts=None, end=bytes(64)) -> bytes:
    """A file with these keys and values; of each tensor its name, shape, type and offset."""
    listed = b""
    for name, shape, kind, offset in tensors:
        numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        listed += text(name) + numbers
    counts = counts or (len(tensors), len(values))
    head = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(values) + listed
    return head + bytes(-len(head) % 32) + end


def value(key: str, kind: int, form: str, *numbers) -> bytes:
    return text(key) + struct.pack(f"<I{form}", kind, *numbers)
