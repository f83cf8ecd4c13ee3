"""The launches of the kernel set that serve candidates. They import the kernel language when they are first called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lce_jax._types import Case
from lce_jax.mosaic._candidate_kernel_set import CandidateKernelSet

if TYPE_CHECKING:
    from lce_jax._shapes import Array, Float, Int

LEAST_HIDDEN = 128  # a number of each row for every thread


class CandidateKernels(CandidateKernelSet, Protocol):
    """Those of `CandidateKernelSet`."""

    def gathers(self, case: Case) -> bool:
        """Where a column of the weight is contiguous."""
        return case.options.vocab_dim == 0 and case.hidden_size >= LEAST_HIDDEN

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
        """A few candidates of one token for each block."""
        from lce_jax.mosaic.common import _candidates

        return _candidates.logits(case, hidden, weight, ids, x, numbers, first)

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
        """One thread per token, a few candidates each."""
        from lce_jax.mosaic.common import _candidates

        return _candidates.values(case, ids, x, terms, targets, scale, factors, numbers, first)

    def put_candidates(
        self,
        case: Case,
        dlogits: Float[Array, "T columns"],
        ids: Int[Array, "n"],
        values: Float[Array, "K*stride"],
        numbers: Int[Array, "5"],
        first: int,
    ) -> Float[Array, "T columns"]:
        """One token for each block."""
        from lce_jax.mosaic.common import _candidates

        return _candidates.put(case, dlogits, ids, values, numbers, first)

    def keep_candidates(
        self, case: Case, ids: Int[Array, "R K"], kept: Int[Array, "n"], numbers: Int[Array, "2"], first: int
    ) -> Int[Array, "n"]:
        """One thread per token, a few candidates each."""
        from lce_jax.mosaic.common import _candidate_tokens

        return _candidate_tokens.keep(case, ids, kept, numbers, first)

    def join_candidates(
        self,
        case: Case,
        x: Float[Array, "N*K Tp"],
        kept: Float[Array, "n"],
        numbers: Int[Array, "2"],
        first: int,
        field: int,
    ) -> Float[Array, "n"]:
        """One thread per token, a few candidates each."""
        from lce_jax.mosaic.common import _candidate_tokens

        return _candidate_tokens.join(case, x, kept, numbers, first, field)

    def candidate_logprobs(
        self, case: Case, kept: Float[Array, "n"], has_temperature: bool, numbers: Int[Array, "2"]
    ) -> Float[Array, "R K"]:
        """One thread per token, a few candidates each."""
        from lce_jax.mosaic.common import _candidate_tokens

        return _candidate_tokens.logprobs(case, kept, has_temperature, numbers)

    def candidate_terms(
        self, case: Case, kept: Float[Array, "n"], has_temperature: bool, seed: Float[Array, "R K"],
        numbers: Int[Array, "2"],
    ) -> Float[Array, "(K+1)*R"]:  # fmt: skip
        """One thread per token, all candidates."""
        from lce_jax.mosaic.common import _candidate_tokens

        return _candidate_tokens.terms(case, kept, has_temperature, seed, numbers)
