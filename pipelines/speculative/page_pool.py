"""Which pages are free. Host-side bookkeeping for both caches, which use the same page ids."""

from __future__ import annotations


class PagePool:
    """Hands out page ids; a page belongs to one row until it is given back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """`count` pages, or an empty list if there are too few."""
        if count > len(self._free):
            return []
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return what `take` gave."""
        self._free.extend(reversed(pages))
