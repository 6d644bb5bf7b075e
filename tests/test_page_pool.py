"""Pages are lent and given back; a pool takes as much memory as was used of it."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool, page_count


def new_pool(num_pages: int, page_size: int = 4):
    return PagePool(num_pages, page_size)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_page_count(page_size):
    pool = new_pool(9, page_size)

    for length in range(50):
        pages = len({position // page_size for position in range(length)})
        assert pool.page_count(length) == page_count(length, page_size) == pages


def test_a_freed_page_is_taken_before_an_unused_one():
    pool = new_pool(9)
    first, second = [], []
    pool.allocate(first, 12)
    pool.free_tail(first, 4)
    assert pool.allocate(second, 12)
    assert sorted(second) == [1, 2, 3] and pool.first_unused == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=40))
def test_each_page_is_free_or_in_one_table(history):
    pool = new_pool(11, 3)
    tables = [[] for _ in range(4)]
    for row, length in history:
        table = tables[row]
        before = list(table)
        missing = pool.page_count(length) - len(before)
        fits = missing <= pool.num_free_pages
        assert pool.allocate(table, length) == fits
        assert table[: len(before)] == before
        assert len(table) - len(before) == (max(missing, 0) if fits else 0)
        pool.free_tail(table, length)
        assert table[: pool.page_count(length)] == table
        held = [page for table in tables for page in table]
        assert sorted([*held, *pool.free_pages]) == list(range(pool.first_unused))
        assert pool.num_free_pages + len(held) == pool.num_pages == 11


def test_ten_million_pages_take_no_memory_before_they_are_used():
    tracemalloc.start()
    pool = new_pool(10**7, 1)
    pages = []
    pool.allocate(pages, 9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7 and pool.num_free_pages == 10**7 - 9
