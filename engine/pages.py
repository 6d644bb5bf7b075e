"""Which pages of the cache are free, and what those hold that have been used."""

import array
import hashlib
import itertools
from collections import OrderedDict


class PagePool:
    """Pages by number, each free or in the tables of one or more requests.

    A free page that was published can be found until it is taken. Pages that nobody can find are taken first, then
    those that were given back first.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.free = OrderedDict.fromkeys(range(num_pages))  # a dict, because any page can leave it at once
        self.holders = [0] * num_pages  # how many tables each page is in
        self.published: dict[bytes, int] = {}  # digest -> page
        self.contents: dict[int, tuple[bytes, bytes, list[int]]] = {}  # page -> its digest, its parent's, its tokens

    def count(self, length: int) -> int:
        """How many pages so many positions need."""
        return -(-length // self.page_size)

    def grow(self, pages: list[int], length: int) -> bool:
        """Add pages to a table, so that `length` positions have room; False, and nothing added, if too few are free."""
        needed = max(self.count(length) - len(pages), 0)
        if needed > len(self.free):
            return False
        for page in list(itertools.islice(self.free, needed)):
            if page in self.contents:  # evicted: nobody finds it any more
                del self.published[self.contents.pop(page)[0]]
            self.hold([page])
            pages.append(page)
        return True

    def hold(self, pages: list[int]) -> None:
        """Count one more table for each page."""
        for page in pages:
            self.free.pop(page, None)
            self.holders[page] += 1

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages of a table behind `length` positions.

        The last one first, so that it is evicted first: what comes before it can be found without it.
        """
        while len(pages) > self.count(length):
            self.release(pages.pop())

    def release(self, page: int) -> None:
        """Count one table less for a page."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free[page] = None
            if page not in self.contents:
                self.free.move_to_end(page, last=False)

    def publish(self, pages: list[int], digests: list[bytes], tokens: list[int], salt: str) -> None:
        """Let others find the pages that these computed tokens fill. digests: of those done before, and now of all."""
        for index in range(len(digests), len(tokens) // self.page_size):
            parent, part = digests[-1] if digests else root(salt), self.part(tokens, index)
            content = digest(parent, part), parent, part
            page = self.published.setdefault(content[0], pages[index])
            if self.contents.setdefault(page, content) != content:
                return  # a collision: nobody could find what comes behind it
            if page != pages[index]:  # somebody was faster: one copy is enough
                self.hold([page])
                self.release(pages[index])
                pages[index] = page
            digests.append(content[0])

    def find(self, tokens: list[int], salt: str) -> list[int]:
        """The published pages that hold the longest prefix of these tokens."""
        found, parent = [], root(salt)
        for index in range(len(tokens) // self.page_size):
            content = digest(parent, self.part(tokens, index)), parent, self.part(tokens, index)
            page = self.published.get(content[0])
            if self.contents.get(page) != content:  # no page, or a collision
                break
            found.append(page)
            parent = content[0]
        return found

    def part(self, tokens: list[int], index: int) -> list[int]:
        """The tokens of a page."""
        return tokens[index * self.page_size : (index + 1) * self.page_size]


def root(salt: str) -> bytes:
    """The parent of a text's first page."""
    return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


def digest(parent: bytes, tokens: list[int]) -> bytes:
    """The name of a full page: of its tokens, and by its parent's name of all before them."""
    return hashlib.sha256(parent + array.array("q", tokens).tobytes()).digest()
