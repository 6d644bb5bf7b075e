"""Pages of keys and values in files, found by page hash after memory forgot them."""

import contextlib
import hashlib
import json
import os
import queue
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cache import KVCache, hash_pages, root_hash
from errors import UserError, warn_once
from loading.checkpoint import DTYPES
from native.build import is_private

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FILE_NAME = re.compile(r"[0-9a-f]{64}\.(safetensors|\w+\.tmp)")  # no other file is ever removed
MAX_QUEUED_BYTES = 2**27  # bytes of pages that wait to be written
ROW_PAGE_SIZE = 16  # positions per page of a contiguous cache, the engine's default


class PrefixFiles:
    """A directory of pages, one safetensors file each, that several processes may share.

    fingerprint: of all that changes a key or value, except tokens and cache_salt. Files of another
    one are not found. max_bytes: limit of all files together; the least recently used are removed.
    storages: of the KV cache groups, (n_layer, 2, num_pages, n_kv_head, page_size, width).
    A thread writes the files, and `close` waits for it. Raises UserError for a directory that
    cannot be written, or to which other users can write.
    """

    def __init__(self, directory: str | Path, fingerprint: str, max_bytes: int):
        self.directory = Path(directory)
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.storages: list[torch.Tensor] = []
        self.num_loaded = 0  # pages of the first group
        self.queue: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self.queued: dict[str, int] = {}  # times of use of the files to be written, by name
        self.lock = threading.Lock()  # of queued
        self.bad: set[str] = set()  # names of files that could not be loaded
        self.unscanned_bytes = max_bytes  # written since the last scan
        check_directory(self.directory)
        self.thread = threading.Thread(target=self.run, name="prefix files", daemon=True)

    def attach(self, storages: list[torch.Tensor]) -> None:
        """Set the storages. Raises UserError if max_bytes is less than 16 of their pages."""
        largest = max(16 * storage[:, :, :1].nbytes for storage in storages)
        if self.max_bytes < largest:
            allowed = f"must be at least {largest} (16 pages)"
            raise UserError(f"--prefix-cache-bytes (max_bytes) {self.max_bytes}: {allowed}")
        self.storages = storages
        if not self.thread.ident:  # only now, because it removes files beyond max_bytes
            self.thread.start()

    def close(self) -> None:
        """Write the queued pages, and end the thread."""
        if self.thread.ident:
            self.queue.put(None)
            self.thread.join()

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
                self.num_loaded += group == 0
                return True
            self.reject(name)
        except FileNotFoundError:  # another process has removed it
            self.bad.add(name)
        except OSError as error:
            self.reject(name, error.strerror)
        return False

    def save(self, group: int, page_hash: bytes, index: int, used: int) -> None:
        """Queue page `index` to be written, or advance the time of its file to `used`.

        used: nanoseconds since the epoch. A page that does not fit into the queue is dropped.
        """
        name = self.name(group, page_hash)
        page = self.storages[group][:, :, index]
        with self.lock:
            if name in self.queued:
                self.queued[name] = max(self.queued[name], used)
                return
        if self.has(group, page_hash):
            with contextlib.suppress(OSError):
                file = self.directory / name
                if file.stat().st_mtime_ns < used:  # other processes use it, too
                    os.utime(file, ns=(used, used))
                return
        if (len(self.queued) + 1) * page.nbytes <= MAX_QUEUED_BYTES:
            with self.lock:
                self.queued[name] = used
            self.queue.put((name, page.to("cpu", copy=True).contiguous()))

    # The methods below run in the writing thread.

    def run(self) -> None:
        """Write queued pages until `close`."""
        failed = False
        while True:
            try:
                if self.unscanned_bytes >= self.max_bytes // 16:
                    self.remove_oldest()
                item = self.queue.get()
                if item is None:
                    return
                self.write(*item)
            except OSError as error:  # such as a full disk
                if not failed:
                    note = f"note: {self.directory}: a prefix was not saved ({error.strerror})"
                    print(note, file=sys.stderr, flush=True)
                failed = True

    def write(self, name: str, page: torch.Tensor) -> None:
        """Write a file under a temporary name, then rename it, so that none is partly written."""
        with self.lock:
            used = self.queued.pop(name)  # if the page is used from now on, it is queued again
        data = memoryview(page.view(torch.uint8).numpy()).cast("B")
        stem = self.directory / name.removesuffix("safetensors")
        descriptor, temporary = tempfile.mkstemp(".tmp", str(stem))  # mode 0600
        try:
            with open(descriptor, "wb") as opened:
                opened.write(header(name, page, data))
                opened.write(data)
            os.utime(temporary, ns=(used, used))
            os.replace(temporary, self.directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.unscanned_bytes += page.nbytes
        self.bad.discard(name)

    def remove_oldest(self) -> None:
        """Remove the least recently used files, until a sixteenth of max_bytes is free."""
        self.unscanned_bytes = 0
        files = []
        for entry in os.scandir(self.directory):
            if FILE_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    # `write` sets the time of use before the rename.
                    is_temporary = entry.name.endswith(".tmp")
                    used = info.st_ctime_ns if is_temporary else info.st_mtime_ns
                    files.append((used, entry.path, info.st_size))
        total = sum(size for *_, size in files)
        reason = None
        for _, path, size in sorted(files):
            if total <= self.max_bytes - self.max_bytes // 16:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:  # such as a directory
                reason = reason or f"{path}: cannot be removed ({error.strerror})"
                continue
            total -= size
        if reason:
            warn_once(reason)


def check_directory(directory: Path) -> None:
    """Create a directory if there is none.

    Raises UserError if it cannot be written, or if other users can write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            private = is_private(directory)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError(f"--prefix-cache {directory}: {reason}") from None
    if not private:
        reason = "must be a directory of this user, to which no other can write"
        raise UserError(f"--prefix-cache {directory}: {reason}")


def header(name: str, page: torch.Tensor, data: bytes | memoryview) -> bytes:
    """Return the safetensors header of a page's file: all bytes before data."""
    metadata = {"name": name, "sha256": hashlib.sha256(data).hexdigest()}
    entry = {"dtype": DTYPE_NAMES[page.dtype], "shape": list(page.shape)}
    entry["data_offsets"] = [0, page.nbytes]
    text = json.dumps({"__metadata__": metadata, "page": entry}).encode()
    text += b" " * (-len(text) % 8)  # data is aligned
    return len(text).to_bytes(8, "little") + text


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes and values of tensors."""

    def digest(name: str) -> bytes:
        tensor = tensors[name].detach().cpu().contiguous()
        hashed = hashlib.sha256(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        hashed.update(tensor.flatten().view(torch.uint8).numpy())
        return hashed.digest()

    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        return hashlib.sha256(b"".join(pool.map(digest, sorted(tensors)))).hexdigest()


def hash_adapters(model) -> dict[str, str]:
    """Return a hash of the weights of each of a model's adapters, by name."""
    weights = {}
    for path, pairs in (model.adapters.layers if model.adapters else {}).items():
        for name, (a, b) in pairs.items():
            weights.setdefault(name, {}).update({f"{path}.A": a, f"{path}.B": b})
    return {name: hash_tensors(tensors) for name, tensors in weights.items()}


def row_pages(cache: KVCache, row: int) -> list[torch.Tensor]:
    """Return a row of a contiguous cache as the storage of pages, a view."""
    count = cache.storage.shape[4] // ROW_PAGE_SIZE
    positions = cache.storage[:, :, row, :, : count * ROW_PAGE_SIZE]
    return [positions.unflatten(3, (count, ROW_PAGE_SIZE)).transpose(2, 3)]


def load_row(files: PrefixFiles, cache: KVCache, row: int, tokens: list[int]) -> None:
    """Fill an empty row of a cache with the saved pages of these tokens, without the last token."""
    files.attach(row_pages(cache, row))
    for index, page_hash in enumerate(hash_pages(tokens[:-1], ROW_PAGE_SIZE, root_hash(""))):
        if not files.has(0, page_hash) or not files.load(0, page_hash, index):
            break
        cache.tokens[row] = tokens[: (index + 1) * ROW_PAGE_SIZE]


def save_row(files: PrefixFiles, cache: KVCache, row: int) -> None:
    """Save the full pages of a row."""
    files.attach(row_pages(cache, row))
    used = time.time_ns()
    page_hashes = hash_pages(cache.tokens[row], ROW_PAGE_SIZE, root_hash(""))
    for index, page_hash in enumerate(page_hashes):
        files.save(0, page_hash, index, used - 1000 * index)
