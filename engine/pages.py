"""Page pool: free pages, and pages in use."""


class PagePool:
    """Page ids, each free or in the page table of one sequence.

    A page table lists the pages of a sequence in order.

    Pages that were never allocated have no record, so the records grow with the pages used.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.first_unused = 0  # this page and all later ones were never allocated
        self.free_pages: list[int] = []  # other free pages

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
            pages.append(self.pop_free_page())
        return True

    def pop_free_page(self) -> int:
        """Return a free page; at least one must exist."""
        if self.free_pages:
            return self.free_pages.pop()
        self.first_unused += 1
        return self.first_unused - 1

    def free_tail(self, pages: list[int], length: int) -> None:
        """Free the pages of a table after the first `length` positions."""
        while len(pages) > self.page_count(length):
            self.free_pages.append(pages.pop())


def page_count(length: int, page_size: int) -> int:
    """Return the number of pages for `length` positions."""
    return -(-length // page_size)
