"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache() -> Iterator[None]:
    """It keeps no program for a device that is not there."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)
