"""Which pages are in use, and by how many. Host-side bookkeeping for both caches, which use the same page ids."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Hands out page ids and counts their holders; a page without a holder is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold `page`."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, now held once each. Takes none and raises a `ValueError` if there are too few."""
        if count > len(self._free):
            raise ValueError(f"found {len(self._free)} free pages, asked for {count}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each of `pages`, which must be held already."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each of `pages`; those without a holder are free again."""
        self._check_held(pages)
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages) or any(not self._holders[page] for page in pages):
            raise ValueError(f"pages {list(pages)}: each must be held, and named once")
