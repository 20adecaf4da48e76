"""What every target's config states, whatever its family: the sizes that a draft must fit, the length, and where the
config came from.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TargetConfig(Protocol):
    """The config of a target. Families add what their own modules need.

    A config may also have `choices`, decisions that its files leave open, and `unknown_fields`, the dotted paths of
    fields of no known meaning.
    """

    @property
    def hidden_size(self) -> int:
        """H: width of the residual stream, of embedding rows and of head inputs."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: token ids, and logits of the head."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """NT: the largest tap."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the model can use."""
        ...

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the norms; compact drafts take it over."""
        ...

    @property
    def architecture(self) -> str:
        """The Hugging Face architecture name, for messages."""
        ...

    @property
    def source(self) -> str:
        """The config file, for messages."""
        ...
