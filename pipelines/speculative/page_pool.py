"""Reference counts of the cache pages, kept on the host. Target and draft cache share the page ids."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Gives out page ids and counts the holders of each page; a page without a holder is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Number of holders of `page`."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Take `count` free pages; each has one holder then. Raises `ValueError` if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"found {len(self._free)} free pages, asked for {count}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of `pages`. Raises `ValueError` for a free page."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from each of `pages`; a page without holders is free. Raises `ValueError` for a free page."""
        self._check_held(pages)
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages) or any(not self._holders[page] for page in pages):
            raise ValueError(f"found pages {list(pages)}, allowed pages in use, each once")
