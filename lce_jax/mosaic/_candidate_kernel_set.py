"""What the host code asks of the kernels for candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lce_jax._types import Case

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int


class CandidateKernelSet(Protocol):
    """The part of a `KernelSet` that serves candidates.

    What is per candidate is flat, a field of some stride for each. ``first`` says which is the first candidate's.
    """

    def gathers(self, case: Case) -> bool:
        """Whether `candidate_logits` serves ``case``."""

    def candidate_logits(
        self,
        case: Case,
        hidden: Float[Array, "T H"],
        weight: Float[Array, "V H"],
        ids: Int[Array, "n"],
        x: Float[Array, "m"],
        numbers: Int[Array, "5"],
        first: tuple[int, int],
    ) -> Float[Array, "m"]:
        """``x`` with the x (eq. 0) of the candidates that are columns of the shard, -inf at the others.

        ``numbers``: how many rows there are, the strides of ``ids`` and of ``x``, the id of the shard's first column,
        and how many columns it has. ``first``: in ``ids`` and in ``x``.
        """

    def candidate_values(
        self,
        case: Case,
        ids: Int[Array, "n"],
        x: Float[Array, "m"],
        terms: Float[Array, "K*stride"],
        targets: Int[Array, "Tp"],
        scale: Float[Array, "Tp"],
        factors: Float[Array, "factors Tp"],
        numbers: Int[Array, "3"],
        first: tuple[int, int],
    ) -> Float[Array, "K*stride"]:
        """The gradient in the raw product at each candidate that is a column of the shard, in float32.

        Anything at the others. The ``terms`` of one id are added in the candidates' order. ``numbers``: how many rows
        there are, the stride, and the id of the shard's first column. ``first``: in ``ids`` and in ``x``.
        """

    def put_candidates(
        self,
        case: Case,
        dlogits: Float[Array, "T columns"],
        ids: Int[Array, "n"],
        values: Float[Array, "K*stride"],
        numbers: Int[Array, "5"],
        first: int,
    ) -> Float[Array, "T columns"]:
        """``dlogits`` with the values of the candidates that are columns of this chunk in their places, rounded.

        ``numbers``: how many rows there are, the stride, the id of the shard's first column, and the columns where the
        chunk begins and ends. ``first``: in ``ids``.
        """

    def keep_candidates(
        self, case: Case, ids: Int[Array, "R K"], kept: Int[Array, "n"], numbers: Int[Array, "2"], first: int
    ) -> Int[Array, "n"]:
        """``kept`` with the ids from its field ``first`` on. ``numbers``: how many rows there are, and its stride."""

    def join_candidates(
        self,
        case: Case,
        x: Float[Array, "N*K Tp"],
        kept: Float[Array, "n"],
        numbers: Int[Array, "2"],
        first: int,
        field: int,
    ) -> Float[Array, "n"]:
        """``kept`` with the x of the candidates of all shards, from its field ``first`` on.

        NaN where its field ``field``, a statistic of all shards, is. ``numbers`` are those of `keep_candidates`.
        """

    def candidate_logprobs(
        self, case: Case, kept: Float[Array, "n"], has_temperature: bool, numbers: Int[Array, "2"]
    ) -> Float[Array, "R K"]:
        """Eq. 3, from what `KernelSet.finish` has kept beside the x. ``numbers`` are those of `keep_candidates`."""

    def candidate_terms(
        self, case: Case, kept: Float[Array, "n"], has_temperature: bool, seed: Float[Array, "R K"],
        numbers: Int[Array, "2"],
    ) -> Float[Array, "(K+1)*R"]:  # fmt: skip
        """What each adds to the gradient in its raw product, and as the last field the Σ g of eq. 4.

        ``seed`` are the cotangents of `candidate_logprobs`. ``numbers`` are those of `keep_candidates`.
        """
