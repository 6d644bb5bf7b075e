"""Which pages of the cache are free, and what those hold that have been used."""

import array
import hashlib
from collections import OrderedDict

from cache import first_seen

MAX_POSITIONS = 2**16  # in the pages of an engine, if nobody asks for more


class PagePool:
    """Pages by number, each free or in the tables of one or more requests.

    A table names the pages of a text in order; None stands for one that nothing reads any more.

    A free page that was published can be found until it is taken. Free pages without a hash are
    reused first, then the least recently released.

    Nothing is kept of a page that was never taken, so memory grows with the pages used.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.begun = 0  # pages from this number on were never taken
        # Those of the others that are free: a dict, because any of them can leave it at once.
        self.returned: OrderedDict[int, None] = OrderedDict()
        self.holders: dict[int, int] = {}  # page -> how many tables it is in
        self.published: dict[bytes, int] = {}  # digest -> page
        self.digest_of: dict[int, bytes] = {}  # page -> digest

    @property
    def available(self) -> int:
        """How many pages are free."""
        return self.num_pages - self.begun + len(self.returned)

    def count(self, length: int) -> int:
        """Pages needed for `length` positions."""
        return page_count(length, self.page_size)

    def grow(self, pages: list[int], length: int) -> bool:
        """Add pages to a table, so that `length` positions have room.

        Returns False, and adds nothing, if too few are free.
        """
        needed = self.count(length) - len(pages)
        if needed > self.available:
            return False
        for _ in range(needed):
            page = self.take()
            self.hold([page])
            pages.append(page)
        return True

    def take(self) -> int:
        """A page that is free; there must be one. A published page loses its digest."""
        first = next(iter(self.returned), None)
        if self.begun < self.num_pages and (first is None or first in self.digest_of):
            self.begun += 1
            return self.begun - 1
        if first in self.digest_of:
            del self.published[self.digest_of.pop(first)]
        return first

    def hold(self, pages: list[int]) -> None:
        """Count one more table for each page."""
        for page in pages:
            self.returned.pop(page, None)
            self.holders[page] = self.holders.get(page, 0) + 1

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages of a table behind `length` positions.

        The last one first, so that it is taken first: what comes before it is found without it.
        """
        while len(pages) > self.count(length):
            page = pages.pop()
            if page is not None:
                self.release(page)

    def drop(self, pages: list[int | None], length: int) -> None:
        """Give back the whole pages of the first `length` positions, which nothing reads again."""
        for index in range(pages.count(None), length // self.page_size):
            self.release(pages[index])
            pages[index] = None

    def release(self, page: int) -> None:
        """Count one table less for a page."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        del self.holders[page]
        self.returned[page] = None
        if page not in self.digest_of:
            self.returned.move_to_end(page, last=False)

    def publish(self, pages: list[int], digests: list[bytes], tokens: list[int], salt: str) -> None:
        """Let others find the pages that these computed tokens fill.

        digests: of those that were published before, and afterwards of all.
        """
        for index in range(len(digests), len(tokens) // self.page_size):
            parent = digests[-1] if digests else root(salt)
            name = digest(parent, self.part(tokens, index))
            digests.append(name)
            if pages[index] is None:
                continue
            page = self.published.setdefault(name, pages[index])
            self.digest_of[page] = name
            if page != pages[index]:  # somebody was faster: one copy is enough
                self.hold([page])
                self.release(pages[index])
                pages[index] = page

    def find(self, tokens: list[int], salt: str, window: int | None = None) -> list[int | None]:
        """The published pages that hold the longest prefix of these tokens.

        window: how many positions a token sees, itself included; None: all. Pages that the token
        after the prefix does not see need not be there; they are None.
        """
        found = []
        run = 0  # how many of the last ones are there
        end = 0  # of the longest prefix
        unseen = 0  # pages before what the token after it sees
        name = root(salt)
        for count in range(1, len(tokens) // self.page_size + 1):
            name = digest(name, self.part(tokens, count - 1))
            found.append(self.published.get(name))
            run = 0 if found[-1] is None else run + 1
            before = first_seen(count * self.page_size, window) // self.page_size
            if run >= count - before:
                end = count
                unseen = before
            elif window is None:
                break
        return [None] * unseen + found[unseen:end]

    def part(self, tokens: list[int], index: int) -> list[int]:
        """The tokens of a page."""
        return tokens[index * self.page_size : (index + 1) * self.page_size]


def page_count(length: int, page_size: int) -> int:
    """Pages needed for `length` positions."""
    return -(-length // page_size)


def default_pages(max_num_seqs: int, block_size: int, page_size: int, itemsize: int = 4) -> int:
    """Pages for max_num_seqs whole windows, but for one, or MAX_POSITIONS, where these are more.

    itemsize: bytes of a number in the cache; with fewer than 4 there are more positions.
    """
    window = page_count(block_size, page_size)
    most = MAX_POSITIONS * 4 // itemsize
    return min(max_num_seqs * window, max(window, page_count(most, page_size)))


def window_pages(
    max_num_seqs: int, max_num_batched_tokens: int, window: int, page_size: int
) -> int:
    """Return enough pages for what max_num_seqs texts see in a window, with a step's tokens.

    n positions lie in at most (n + 2 * page_size - 2) // page_size pages. Of each text that is its
    share of the budget and window - 1 before it.
    """
    return (max_num_batched_tokens + max_num_seqs * (window - 1 + 2 * page_size - 2)) // page_size


def salted(salt: str, adapter: str) -> str:
    """The salt of a text that the model has this adapter for, whose name has no NUL.

    No two pairs have the same: keys and values depend on the adapter.
    """
    return f"\0{adapter}\0{salt}" if adapter or salt.startswith("\0") else salt


def root(salt: str) -> bytes:
    """The parent of a text's first page."""
    return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def digest(parent: bytes, tokens: list[int]) -> bytes:
    """A full page's name: a hash of its tokens and, by the parent's name, of all tokens before.

    SHA-256, so that two pages of one name hold the same: no two inputs of one digest are known.
    """
    return hashlib.sha256(parent + array.array("q", tokens).tobytes()).digest()
