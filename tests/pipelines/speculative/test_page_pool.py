"""The page pool against a model with a list per holder, in random sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dspark_jax.pipelines.speculative.page_pool import PagePool

NUM_PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and release whole lists of pages; `held` has a line for every holder."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held = PagePool(NUM_PAGES), list[list[int]]()

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def take(self, count: int) -> None:
        free = {*range(NUM_PAGES)} - {page for pages in self.held for page in pages}
        if count > len(free):
            with pytest.raises(ValueError, match=f"found {len(free)} free pages, asked for {count}"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= free
        self.held.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.held:
            pages = data.draw(st.sampled_from(self.held))[: data.draw(st.integers(0, 3))]
            self.pool.share(pages)
            self.held.append(list(pages))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_has_its_holders(self) -> None:
        for page in range(NUM_PAGES):
            assert self.pool.holders(page) == sum(page in pages for pages in self.held)
        assert self.pool.num_free == sum(not self.pool.holders(page) for page in range(NUM_PAGES))


TestPool = PoolMachine.TestCase


def test_a_page_that_nobody_holds_can_be_neither_shared_nor_released() -> None:
    pool = PagePool(2)
    [page] = pool.take(1)
    pool.release([page])
    for call in (pool.share, pool.release):
        with pytest.raises(ValueError, match="allowed pages in use, each once"):
            call([page])


def test_a_page_cannot_be_named_twice_in_one_call() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    with pytest.raises(ValueError, match="allowed pages in use, each once"):
        pool.release([pages[0], pages[0]])
    assert pool.num_free == 0
