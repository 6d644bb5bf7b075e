"""Which pages of the cache are free, and what those hold that have been used."""

import array
import hashlib
from collections import OrderedDict

from cache import first_visible_position

MAX_POSITIONS = 2**16  # in the pages of an engine, if nobody asks for more


class PagePool:
    """Pages by number, each free or in the tables of one or more requests.

    A table names the pages of a text in order; None stands for one that nothing reads any more.

    A free page that was cached can be found until it is taken. Free pages without a hash are
    reused first, then the least recently released.

    Nothing is kept of a page that was never taken, so memory grows with the pages used.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.first_unused = 0  # pages from this number on were never taken
        # Those of the others that are free: a dict, because any of them can leave it at once.
        self.free_pages: OrderedDict[int, None] = OrderedDict()
        self.ref_counts: dict[int, int] = {}  # page -> how many tables it is in
        self.hash_to_page: dict[bytes, int] = {}  # hash -> page
        self.page_to_hash: dict[int, bytes] = {}  # page -> hash

    @property
    def num_free_pages(self) -> int:
        """How many pages are free."""
        return self.num_pages - self.first_unused + len(self.free_pages)

    def page_count(self, length: int) -> int:
        """Pages needed for `length` positions."""
        return page_count(length, self.page_size)

    def allocate(self, pages: list[int], length: int) -> bool:
        """Add pages to a table, so that `length` positions have room.

        Returns False, and adds nothing, if too few are free.
        """
        needed = self.page_count(length) - len(pages)
        if needed > self.num_free_pages:
            return False
        for _ in range(needed):
            page = self.pop_free_page()
            self.acquire([page])
            pages.append(page)
        return True

    def pop_free_page(self) -> int:
        """A page that is free; there must be one. A cached page loses its hash."""
        first = next(iter(self.free_pages), None)
        if self.first_unused < self.num_pages and (first is None or first in self.page_to_hash):
            self.first_unused += 1
            return self.first_unused - 1
        if first in self.page_to_hash:
            del self.hash_to_page[self.page_to_hash.pop(first)]
        return first

    def acquire(self, pages: list[int]) -> None:
        """Count one more table for each page."""
        for page in pages:
            self.free_pages.pop(page, None)
            self.ref_counts[page] = self.ref_counts.get(page, 0) + 1

    def free_after(self, pages: list[int], length: int) -> None:
        """Give back the pages of a table behind `length` positions.

        The last one first, so that it is taken first: what comes before it is found without it.
        """
        while len(pages) > self.page_count(length):
            page = pages.pop()
            if page is not None:
                self.free(page)

    def free_before(self, pages: list[int | None], length: int) -> None:
        """Give back the whole pages of the first `length` positions, which nothing reads again."""
        for index in range(pages.count(None), length // self.page_size):
            self.free(pages[index])
            pages[index] = None

    def free(self, page: int) -> None:
        """Count one table less for a page."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page]:
            return
        del self.ref_counts[page]
        self.free_pages[page] = None
        if page not in self.page_to_hash:
            self.free_pages.move_to_end(page, last=False)

    def cache_pages(
        self, pages: list[int], page_hashes: list[bytes], tokens: list[int], cache_salt: str
    ) -> None:
        """Let others find the pages that these computed tokens fill.

        page_hashes: of those that were cached before, and afterwards of all.
        """
        for index in range(len(page_hashes), len(tokens) // self.page_size):
            parent_hash = page_hashes[-1] if page_hashes else root_hash(cache_salt)
            page_hash = hash_page(parent_hash, self.page_tokens(tokens, index))
            page_hashes.append(page_hash)
            if pages[index] is None:
                continue
            page = self.hash_to_page.setdefault(page_hash, pages[index])
            self.page_to_hash[page] = page_hash
            if page != pages[index]:  # somebody was faster: one copy is enough
                self.acquire([page])
                self.free(pages[index])
                pages[index] = page

    def find_cached(
        self, tokens: list[int], cache_salt: str, sliding_window: int | None = None
    ) -> list[int | None]:
        """The cached pages that hold the longest prefix of these tokens.

        sliding_window: how many positions a token sees, itself included; None: all. Pages that the
        token after the prefix does not see need not be there; they are None.
        """
        found = []
        run_length = 0  # how many of the last ones are there
        end = 0  # of the longest prefix
        num_skipped = 0  # pages before what the token after it sees
        page_hash = root_hash(cache_salt)
        for count in range(1, len(tokens) // self.page_size + 1):
            page_hash = hash_page(page_hash, self.page_tokens(tokens, count - 1))
            found.append(self.hash_to_page.get(page_hash))
            run_length = 0 if found[-1] is None else run_length + 1
            first = first_visible_position(count * self.page_size, sliding_window) // self.page_size
            if run_length >= count - first:
                end = count
                num_skipped = first
            elif sliding_window is None:
                break
        return [None] * num_skipped + found[num_skipped:end]

    def page_tokens(self, tokens: list[int], index: int) -> list[int]:
        """The tokens of a page."""
        return tokens[index * self.page_size : (index + 1) * self.page_size]


def page_count(length: int, page_size: int) -> int:
    """Pages needed for `length` positions."""
    return -(-length // page_size)


def default_num_pages(max_num_seqs: int, block_size: int, page_size: int, itemsize: int = 4) -> int:
    """Pages for max_num_seqs whole windows, but for one, or MAX_POSITIONS, where these are more.

    itemsize: bytes of a number in the cache; with fewer than 4 there are more positions.
    """
    per_sequence = page_count(block_size, page_size)
    most = MAX_POSITIONS * 4 // itemsize
    return min(max_num_seqs * per_sequence, max(per_sequence, page_count(most, page_size)))


def sliding_page_count(
    max_num_seqs: int, max_num_batched_tokens: int, sliding_window: int, page_size: int
) -> int:
    """Return enough pages for what max_num_seqs texts see in a window, with a step's tokens.

    n positions lie in at most (n + 2 * page_size - 2) // page_size pages. Of each text that is its
    share of the budget and window - 1 before it.
    """
    return (
        max_num_batched_tokens + max_num_seqs * (sliding_window - 1 + 2 * page_size - 2)
    ) // page_size


def salt_with_adapter(cache_salt: str, adapter: str) -> str:
    """The cache_salt of a text that the model has this adapter for, whose name has no NUL.

    No two pairs have the same: keys and values depend on the adapter.
    """
    return f"\0{adapter}\0{cache_salt}" if adapter or cache_salt.startswith("\0") else cache_salt


def root_hash(cache_salt: str) -> bytes:
    """The parent of a text's first page."""
    return hashlib.sha256(cache_salt.encode(errors="surrogatepass")).digest()


def hash_page(parent_hash: bytes, tokens: list[int]) -> bytes:
    """A full page's name: a hash of its tokens and, by the parent's name, of all tokens before.

    SHA-256, so that two pages of one name hold the same: no two inputs of one hash are known.
    """
    return hashlib.sha256(parent_hash + array.array("q", tokens).tobytes()).digest()
