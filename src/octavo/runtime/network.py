"""What a runner asks of a network."""

from typing import Protocol

from octavo.ops.api import F32, I32, Batch, KVPool


class Head(Protocol):
    """What a network gives of the batch it has computed last."""

    def logits(self, rows: I32) -> F32:
        """The logits of these rows of the batch, at most as many as `forward` gives at once; a view
        that the next call overwrites."""


class Network(Head, Protocol):
    """A decoder: writes the KV of the batch, and gives the logits of its `logit_rows`."""

    def forward(self, batch: Batch, pool: KVPool) -> F32: ...
