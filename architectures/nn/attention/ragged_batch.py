"""A ragged batch: the tokens of several rows in one flat axis, the input of one target forward."""

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
    """The tokens of `B` rows, row after row, padded to `T` tokens.

    A token at `PADDING_POSITION` is inert: it is not stored in the cache, and its outputs have no meaning. A
    `rectangular` batch has exactly `row_width` tokens for every row, so that reshapes replace the gathers between the
    flat and the row-wise form. Axis letter `L`: `row_width`.
    """

    tokens: Int32[Array, "T"]
    positions: Int32[Array, "T"]  # absolute
    row_of_token: Int32[Array, "T"]  # index of the row that the token belongs to
    row_offsets: Int32[Array, "bounds"]  # B + 1 entries: row b is tokens[row_offsets[b] : row_offsets[b + 1]]
    # The largest number of tokens of one row.
    row_width: int = dataclasses.field(metadata={"static": True})
    rectangular: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def rectangle(cls, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"]) -> RaggedBatch:
        """The rectangular batch with `L` tokens for every row. Unused tokens are at `PADDING_POSITION`."""
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
        """The batch with `lengths[b]` tokens of every row b, row after row, in a flat axis of `num_tokens`.

        The tokens of row b are at positions `first_positions[b]` and following. `token_of(row, index_in_row)` returns
        the ids of the tokens. The sum of the lengths must be at most `num_tokens`; the remaining tokens are inert.
        """
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, token, side="right").astype(jnp.int32), lengths.shape[0] - 1)
        index_in_row = token - offsets[row]
        return cls(
            tokens=token_of(row, index_in_row),
            positions=jnp.where(token < ends[-1], first_positions[row] + index_in_row, PADDING_POSITION),
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
        """The index of each token within its row."""
        return jnp.arange(self.tokens.shape[0], dtype=jnp.int32) - self.row_offsets[self.row_of_token]

    def keep(self, lengths: Int32[Array, "B"]) -> RaggedBatch:
        """The batch in which only the first `lengths[b]` tokens of each row b are not inert."""
        kept: Bool[Array, "T"] = self.index_in_row < lengths[self.row_of_token]
        return dataclasses.replace(self, positions=jnp.where(kept, self.positions, PADDING_POSITION))

    def all_in_row(self, flags: Bool[Array, "T"]) -> Bool[Array, "B"]:
        """Whether the flag is true for all tokens of each row, inert tokens included."""
        if self.rectangular:
            return jnp.all(self.to_rows(flags), axis=1)
        return jnp.ones((self.num_rows,), bool).at[self.row_of_token].min(flags)

    def to_rows(self, flat: Shaped[Array, "T *axes"]) -> Shaped[Array, "B L *axes"]:
        """The flat tokens as rows of width `L`. Entries beyond the end of a row repeat other tokens and are unused."""
        if self.rectangular:
            return flat.reshape(self.num_rows, self.row_width, *flat.shape[1:])
        index = self.row_offsets[:-1, None] + jnp.arange(self.row_width, dtype=jnp.int32)[None, :]
        return flat[jnp.minimum(index, flat.shape[0] - 1)]

    def to_flat(self, rows: Shaped[Array, "B L *axes"]) -> Shaped[Array, "T *axes"]:
        """The inverse of `to_rows`."""
        if self.rectangular:
            return rows.reshape(-1, *rows.shape[2:])
        return rows[self.row_of_token, jnp.clip(self.index_in_row, 0, self.row_width - 1)]
