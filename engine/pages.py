"""Page pool with reference counts and prefix caching."""

from collections import OrderedDict
from collections.abc import Callable

from cache import first_visible_position, hash_pages, root_hash


class PagePool:
    """Reference-counted page ids, with prefix caching.

    A page table lists the pages of a sequence in order. None is a null page, freed because no
    position reads it any more.

    A free page with a hash stays cached until it is reused. Pages without one are reused first,
    then the least recently freed.

    Pages that were never allocated have no record, so the records grow with the pages used.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.first_unused = 0  # this page and all later ones were never allocated
        # Other free pages in order of reuse: a dict, to remove any page in constant time.
        self.free_pages: OrderedDict[int, None] = OrderedDict()
        self.ref_counts: dict[int, int] = {}  # page -> number of page tables that list it
        self.hash_to_page: dict[bytes, int] = {}
        self.page_to_hash: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        """Return the number of free pages."""
        return self.num_pages - self.first_unused + len(self.free_pages)

    def page_count(self, length: int) -> int:
        """Return the number of pages for `length` positions."""
        return page_count(length, self.page_size)

    def allocate(self, pages: list[int], length: int) -> bool:
        """Append pages to a page table until it holds `length` positions.

        Returns False, and appends nothing, if too few pages are free.
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
        """Return a free page; at least one must exist. A cached page loses its hash."""
        first = next(iter(self.free_pages), None)
        if self.first_unused < self.num_pages and (first is None or first in self.page_to_hash):
            self.first_unused += 1
            return self.first_unused - 1
        if first in self.page_to_hash:
            del self.hash_to_page[self.page_to_hash.pop(first)]
        return first

    def acquire(self, pages: list[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            self.free_pages.pop(page, None)
            self.ref_counts[page] = self.ref_counts.get(page, 0) + 1

    def free_tail(self, pages: list[int], length: int) -> None:
        """Free the pages of a table after the first `length` positions, last page first.

        So the last page is reused first, and the prefix before it can still be found.
        """
        while len(pages) > self.page_count(length):
            page = pages.pop()
            if page is not None:
                self.free(page)

    def free_skipped(self, pages: list[int | None], length: int) -> None:
        """Free the full pages of the first `length` positions, which no sliding window needs.

        Their entries in the table become None.
        """
        for index in range(pages.count(None), length // self.page_size):
            self.free(pages[index])
            pages[index] = None

    def free(self, page: int) -> None:
        """Drop one reference to a page; after the last one it is free."""
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
        """Register for prefix caching the pages that these computed tokens fill.

        page_hashes: hashes so far. The hashes of newly full pages are appended in place. A page
        that duplicates a cached one is freed and replaced by it in `pages`.
        """
        num_cached = len(page_hashes)
        parent_hash = page_hashes[-1] if page_hashes else root_hash(cache_salt)
        new = hash_pages(tokens[num_cached * self.page_size :], self.page_size, parent_hash)
        for index, page_hash in enumerate(new, num_cached):
            page_hashes.append(page_hash)
            if pages[index] is None:
                continue
            page = self.hash_to_page.setdefault(page_hash, pages[index])
            self.page_to_hash[page] = page_hash
            if page != pages[index]:  # another request cached it first: keep one copy
                self.acquire([page])
                self.free(pages[index])
                pages[index] = page

    def find_cached(
        self,
        tokens: list[int],
        cache_salt: str,
        sliding_window: int | None = None,
        is_saved: Callable[[bytes], bool] | None = None,
    ) -> list[int | bytes | None]:
        """Return the cached pages of the longest cached prefix of these tokens.

        sliding_window: positions visible to a token, itself included; None: all. Pages outside the
        sliding window of the token after the prefix need not be cached; they are None. is_saved:
        whether a file holds the page of this hash. Such a page counts as cached, by its hash.
        """
        found = []
        run_length = 0  # consecutive cached pages up to here
        end = 0  # pages of the longest prefix
        num_skipped = 0  # of these, before the sliding window of the next token
        page_hashes = hash_pages(tokens, self.page_size, root_hash(cache_salt))
        for count, page_hash in enumerate(page_hashes, 1):
            page = self.hash_to_page.get(page_hash)
            if page is None and is_saved and is_saved(page_hash):
                page = page_hash
            found.append(page)
            run_length = 0 if found[-1] is None else run_length + 1
            first = first_visible_position(count * self.page_size, sliding_window) // self.page_size
            if run_length >= count - first:
                end = count
                num_skipped = first
            elif sliding_window is None:
                break
        return [None] * num_skipped + found[num_skipped:end]

    def load_pages(
        self, found: list[int | bytes | None], load: Callable[[bytes, int], bool]
    ) -> bool:
        """Load the saved pages of a prefix from `find_cached`; return False if one fails.

        Loaded pages are cached, without a reference. load(page_hash, page): fills a free page.
        """
        held = [page for page in found if isinstance(page, int)]  # else they might be reused
        self.acquire(held)
        try:
            for page_hash in found:
                if not isinstance(page_hash, bytes):
                    continue
                if not self.num_free_pages:
                    break
                page = self.pop_free_page()
                self.acquire([page])
                held.append(page)
                if not load(page_hash, page):
                    return False
                self.hash_to_page[page_hash] = page
                self.page_to_hash[page] = page_hash
        finally:
            for page in reversed(held):  # so that the last page is reused first
                self.free(page)
        return True


def page_count(length: int, page_size: int) -> int:
    """Return the number of pages for `length` positions."""
    return -(-length // page_size)


def sliding_page_count(
    max_num_seqs: int, max_num_batched_tokens: int, sliding_window: int, page_size: int
) -> int:
    """Return how many pages the windows of max_num_seqs sequences and a step's tokens can need.

    n positions lie in at most (n + 2 * page_size - 2) // page_size pages. For each sequence, n is
    its share of max_num_batched_tokens plus sliding_window - 1.
    """
    return (
        max_num_batched_tokens + max_num_seqs * (sliding_window - 1 + 2 * page_size - 2)
    ) // page_size


def salt_with_adapter(cache_salt: str, adapter: str) -> str:
    """Return the cache_salt combined with an adapter's name, which must not contain NUL.

    Distinct pairs give distinct salts, because keys and values depend on the adapter.
    """
    return f"\0{adapter}\0{cache_salt}" if adapter or cache_salt.startswith("\0") else cache_salt
