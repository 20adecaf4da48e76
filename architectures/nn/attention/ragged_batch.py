"""A ragged batch: the tokens of several rows in one flat axis, as one target forward sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

PADDING_POSITION = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Tokens of `B` rows, row after row, padded to `T`.

    A token at `PADDING_POSITION` is inert: it writes no cache row and its outputs mean nothing. `row_width` bounds the
    tokens of one row; a `rectangular` batch holds exactly `row_width` tokens of every row, which spares the gathers
    between the flat and the row-wise form.
    """

    tokens: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    row_of_token: Int32[Array, "T"]
    row_offsets: Int32[Array, "bounds"]  # B + 1
    row_width: int = dataclasses.field(metadata={"static": True})
    rectangular: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def rectangle(cls, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"]) -> RaggedBatch:
        """`L` tokens of every row; unused ones carry `PADDING_POSITION`."""
        rows, width = tokens.shape
        return cls(
            tokens=tokens.reshape(-1),
            positions=positions.reshape(-1),
            row_of_token=jnp.repeat(jnp.arange(rows, dtype=jnp.int32), width),
            row_offsets=jnp.arange(rows + 1, dtype=jnp.int32) * width,
            row_width=width,
            rectangular=True,
        )

    @classmethod
    def packed(
        cls,
        lengths: Int32[Array, "B"],
        first_positions: Int32[Array, "B"],
        token_of: Callable[[Int32[Array, "T"], Int32[Array, "T"]], Int32[Array, "T"]],
        *,
        num_tokens: int,
        row_width: int,
    ) -> RaggedBatch:
        """The first `lengths[b]` tokens of every row, row after row, in a flat axis of `num_tokens`.

        `token_of(row, index in the row)` gives the token ids; a row stands at `first_positions[b]` and after. The
        lengths must add up to at most `num_tokens`; what is left over is inert.
        """
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
        place = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, place, side="right").astype(jnp.int32), lengths.shape[0] - 1)
        index = place - offsets[row]
        return cls(
            tokens=token_of(row, index),
            positions=jnp.where(place < ends[-1], first_positions[row] + index, PADDING_POSITION),
            row_of_token=row,
            row_offsets=offsets,
            row_width=row_width,
        )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.row_offsets.shape[0] - 1

    @property
    def index_in_row(self) -> Int32[Array, "T"]:
        """Which token of its row each token is."""
        return jnp.arange(self.tokens.shape[0], dtype=jnp.int32) - self.row_offsets[self.row_of_token]

    def keep(self, lengths: Int32[Array, "B"]) -> RaggedBatch:
        """The same batch in which all but the first `lengths` tokens of each row are inert."""
        kept: Bool[Array, "T"] = self.index_in_row < lengths[self.row_of_token]
        return dataclasses.replace(self, positions=jnp.where(kept, self.positions, PADDING_POSITION))

    def all_in_row(self, flags: Bool[Array, "T"]) -> Bool[Array, "B"]:
        """Whether all tokens of each row have the flag; inert tokens are asked, too."""
        if self.rectangular:
            return jnp.all(self.to_rows(flags), axis=1)
        return jnp.ones((self.num_rows,), bool).at[self.row_of_token].min(flags)

    def to_rows(self, flat: Shaped[Array, "T *axes"]) -> Shaped[Array, "B L *axes"]:
        """Flat -> one line per row; places past a row's end repeat some token and mean nothing."""
        if self.rectangular:
            return flat.reshape(self.num_rows, self.row_width, *flat.shape[1:])
        index = self.row_offsets[:-1, None] + jnp.arange(self.row_width, dtype=jnp.int32)[None, :]
        return flat[jnp.minimum(index, flat.shape[0] - 1)]

    def to_flat(self, rows: Shaped[Array, "B L *axes"]) -> Shaped[Array, "T *axes"]:
        """The inverse of `to_rows`."""
        if self.rectangular:
            return rows.reshape(-1, *rows.shape[2:])
        return rows[self.row_of_token, jnp.clip(self.index_in_row, 0, self.row_width - 1)]
