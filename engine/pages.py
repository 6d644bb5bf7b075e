"""Which pages of the cache are free."""


class PagePool:
    """Pages by number, each free or in the table of a request.

    Nothing is kept of a page that was never taken: a pool takes as much memory as it is used.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.begun = 0  # pages from this number on were never taken
        self.returned: list[int] = []  # of the others, those that are free

    @property
    def available(self) -> int:
        """How many pages are free."""
        return self.num_pages - self.begun + len(self.returned)

    def count(self, length: int) -> int:
        """How many pages so many positions need."""
        return page_count(length, self.page_size)

    def grow(self, pages: list[int], length: int) -> bool:
        """Add pages to a table, so that `length` positions have room.

        Returns False, and adds nothing, if too few are free.
        """
        needed = self.count(length) - len(pages)
        if needed > self.available:
            return False
        for _ in range(needed):
            pages.append(self.take())
        return True

    def take(self) -> int:
        """A page that is free; there must be one."""
        if self.returned:
            return self.returned.pop()
        self.begun += 1
        return self.begun - 1

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages of a table behind `length` positions."""
        while len(pages) > self.count(length):
            self.returned.append(pages.pop())


def page_count(length: int, page_size: int) -> int:
    """How many pages so many positions need."""
    return -(-length // page_size)
