"""The interface of a target's config: the sizes that a draft must fit, the usable length, and the source file."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TargetConfig(Protocol):
    """The fields that the config of every target has. A family adds the fields that its own modules need.

    A config may also have `choices`, the decisions that its files leave open, and `unknown_fields`, the dotted paths of
    fields with no known meaning.
    """

    @property
    def hidden_size(self) -> int:
        """H: width of the residual stream, of an embedding row and of the head's input."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: number of token ids, and of logits."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, which is also the largest tap."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the target can use."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the RMS norms. A compact draft made for the target uses the same."""
        ...

    @property
    def architecture(self) -> str:
        """The Hugging Face architecture name, used in messages."""
        ...

    @property
    def source(self) -> str:
        """Path of the config file, used in messages."""
        ...


@runtime_checkable
class HasTargetConfig(Protocol):
    """Any object with the config of a target, such as a target itself."""

    @property
    def config(self) -> TargetConfig:
        """The config of the target."""
        ...
