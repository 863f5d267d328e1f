"""What the OpenAPI document says, and what happens to requests made up from it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from server import openapi
from tests.server.running import RunningServer

schema = schemathesis.openapi.from_dict(openapi.document())


@pytest.fixture(scope="module")
def target(tiny_model):
    with RunningServer(tiny_model("gqa")) as server:
        yield server
        server.wait_until_idle()


@schema.parametrize()
@settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip
def test_no_request_makes_the_server_fail(target, case):
    case.call_and_validate(base_url=target.url, checks=(not_a_server_error,), timeout=30)
