"""Pages of keys and values in files, found by page hash after memory forgot them."""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from errors import warn_once
from loading.checkpoint import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PrefixFiles:
    """A directory of pages, one safetensors file each, that several processes may share.

    fingerprint: of all that changes a key or value, except tokens and cache_salt. Files of another
    one are not found. storages: of the KV cache groups, (n_layer, 2, num_pages, n_kv_head,
    page_size, width), set by the owner of the cache.
    """

    def __init__(self, directory: str | Path, fingerprint: str):
        self.directory = Path(directory)
        self.fingerprint = fingerprint
        self.storages: list[torch.Tensor] = []
        self.bad: set[str] = set()  # names of files that could not be loaded
        self.failed = False  # whether a page could not be saved
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def name(self, group: int, page_hash: bytes) -> str:
        """Return the file name of a page of a KV cache group."""
        storage = self.storages[group]
        kind = self.fingerprint, group, storage.dtype, storage.shape[:2], storage.shape[3:]
        return f"{hashlib.sha256(repr(kind).encode() + page_hash).hexdigest()}.safetensors"

    def has(self, group: int, page_hash: bytes) -> bool:
        """Return whether a file of the right size exists for a page. Its data may be damaged."""
        name = self.name(group, page_hash)
        if name in self.bad:
            return False
        try:
            size = (self.directory / name).stat().st_size
        except OSError:
            return False
        page = self.storages[group][:, :, 0]
        if size == len(header(name, page, b"")) + page.nbytes:
            return True
        self.reject(name)
        return False

    def reject(self, name: str, reason: str = "not the file that was saved") -> None:
        """Do not use a file until it is written again."""
        self.bad.add(name)
        warn_once(f"{self.directory / name}: {reason}; the page is computed instead")

    def load(self, group: int, page_hash: bytes, index: int) -> bool:
        """Fill page `index` from its file; return False if the file is not what was saved.

        The file is read, because a mapped file that another process truncates kills this one.
        """
        name = self.name(group, page_hash)
        page = self.storages[group][:, :, index]
        start = len(header(name, page, b""))
        size = start + page.nbytes
        buffer = bytearray(size + 1)
        try:
            with open(self.directory / name, "rb") as opened:
                count = opened.readinto(buffer)
            data = memoryview(buffer)[start:size]
            # A header has only this form, so nothing in it needs to be parsed.
            if count == size and buffer[:start] == header(name, page, data):
                page.copy_(torch.frombuffer(data, dtype=page.dtype).view(page.shape))
                return True
            self.reject(name)
        except FileNotFoundError:  # another process has removed it
            self.bad.add(name)
        except OSError as error:
            self.reject(name, error.strerror)
        return False

    def save(self, group: int, page_hash: bytes, index: int) -> None:
        """Write page `index` to its file, unless that exists."""
        if self.has(group, page_hash):
            return
        page = self.storages[group][:, :, index].to("cpu", copy=True).contiguous()
        try:
            self.write(self.name(group, page_hash), page)
        except OSError as error:  # such as a full disk
            if not self.failed:
                note = f"note: {self.directory}: a prefix was not saved ({error.strerror})"
                print(note, file=sys.stderr, flush=True)
            self.failed = True

    def write(self, name: str, page: torch.Tensor) -> None:
        """Write a file under a temporary name, then rename it, so that none is partly written."""
        data = memoryview(page.view(torch.uint8).numpy()).cast("B")
        stem = self.directory / name.removesuffix("safetensors")
        descriptor, temporary = tempfile.mkstemp(".tmp", str(stem))  # mode 0600
        try:
            with open(descriptor, "wb") as opened:
                opened.write(header(name, page, data))
                opened.write(data)
            os.replace(temporary, self.directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.bad.discard(name)


def header(name: str, page: torch.Tensor, data: bytes | memoryview) -> bytes:
    """Return the safetensors header of a page's file: all bytes before data."""
    metadata = {"name": name, "sha256": hashlib.sha256(data).hexdigest()}
    entry = {"dtype": DTYPE_NAMES[page.dtype], "shape": list(page.shape)}
    entry["data_offsets"] = [0, page.nbytes]
    text = json.dumps({"__metadata__": metadata, "page": entry}).encode()
    text += b" " * (-len(text) % 8)  # data is aligned
    return len(text).to_bytes(8, "little") + text
