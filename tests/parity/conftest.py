"""The peers are imported by the tests that ask for them: the default suite never loads torch."""

from __future__ import annotations

import pytest

REASON = "needs the peers: pip install -e '.[parity]'"


@pytest.fixture(scope="session")
def peers():
    """`tests.parity.peers`, or a skip that says what to install."""
    pytest.importorskip("torch", reason=REASON)
    pytest.importorskip("transformers", reason=REASON)
    from tests.parity import peers

    return peers
