"""Servers that tests share."""

from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def fake(tiny_model) -> Iterator[RunningServer]:
    """A server over an engine that answers letters."""
    with RunningServer(tiny_model("gqa")) as server:
        yield server
