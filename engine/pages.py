"""Which pages of the cache are free."""

from checkpoint import UserError


class PagePool:
    """Pages by number, each free or in the table of a request."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.free = list(range(num_pages))

    def count(self, length: int) -> int:
        """How many pages so many positions need."""
        return -(-length // self.page_size)

    def grow(self, pages: list[int], length: int) -> bool:
        """Add pages to a table, so that `length` positions have room; False, and nothing added, if too few are free."""
        needed = max(self.count(length) - len(pages), 0)
        if needed > len(self.free):
            return False
        pages += [self.free.pop() for _ in range(needed)]
        return True

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages of a table behind `length` positions."""
        while len(pages) > self.count(length):
            self.free.append(pages.pop())


def check_counts(**counts: int) -> None:
    """Raise UserError for the first that is not a positive integer."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"{name} is {count!r}; it must be an integer >= 1")
