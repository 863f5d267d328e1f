import dataclasses
from collections.abc import Iterator
from fractions import Fraction

import jaxtyping
import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def no_type_checks() -> Iterator[None]:
    """As in production: what refuses a value of the wrong type is `SamplingParams` itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", 2),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [5, -1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**63]),
        ("max_tokens", np.int64(0)),
        ("max_tokens", 2**63),
        ("max_tokens", float("nan")),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("max_tokens", np.True_),
        ("max_tokens", "5"),
        ("temperature", np.float32(-1.5)),
        ("temperature", np.float32("nan")),
        ("temperature", -float("inf")),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", None),
        ("top_k", 2**63),
        ("top_k", float("inf")),
        ("top_k", np.int32(-2)),
        ("top_p", np.float32(1.5)),
        ("top_p", True),
        ("top_p", None),
        ("seed", np.float64(1.0)),
        ("seed", True),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
    ],
)
def test_value_out_of_range_is_refused_with_field_and_value(field, value):
    with pytest.raises(ValueError, match=f"SamplingParams.{field}") as error:
        SamplingParams(**{field: value})
    at_fault = value[-1] if isinstance(value, list) else value
    assert repr(at_fault) in str(error.value)


@pytest.mark.parametrize(
    "field", ["n", "presence_penalty", "logit_bias", "min_p", "prompt_logprobs"]
)
def test_feature_that_is_not_offered_is_refused_by_name(field):
    with pytest.raises(TypeError, match=f"'{field}'"):
        SamplingParams(**{field: 1})


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [({"temperature": 0.0}, True), ({"top_k": 1}, True), ({}, False), ({"top_k": 2}, False)],
)
def test_only_one_candidate_is_greedy(params, is_greedy):
    assert SamplingParams(**params).is_greedy == is_greedy


def test_lists_are_kept_as_tuples_and_a_single_stop_string_is_one_entry():
    params = SamplingParams(stop="ab", stop_token_ids=[3, 4])
    assert params.stop == ("ab",) and params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert hash(params) == hash(SamplingParams(stop=("ab",), stop_token_ids=(3, 4)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", np.int64(7)),
        ("max_tokens", np.uint8(7)),
        ("top_k", np.int32(5)),
        ("seed", np.uint64(2**64 - 1)),
        ("seed", np.int64(-(2**63))),
        ("logprobs", np.int64(1)),
        ("temperature", np.float32(0.5)),
        ("temperature", np.int64(1)),
        ("temperature", 1),
        ("top_p", np.float64(0.25)),
        ("top_p", np.float16(0.5)),
        ("top_p", Fraction(1, 4)),
    ],
)
def test_any_number_is_taken_and_kept_as_plain_python(field, value):
    params = SamplingParams(**{field: value})
    kept = getattr(params, field)
    assert kept == value
    assert type(kept) is (float if field in ("temperature", "top_p") else int)


def test_ids_of_numpy_are_kept_as_plain_python():
    ids = SamplingParams(stop_token_ids=list(np.array([3, 4]))).stop_token_ids
    assert ids == (3, 4) and {type(token_id) for token_id in ids} == {int}


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs"]
)
@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**5000], ids=["1e400", "-1e400", "1e5000"]
)
def test_huge_integer_is_refused_in_few_words(field, value):
    with pytest.raises(ValueError, match=f"SamplingParams.{field} is .*; it must be ") as error:
        SamplingParams(**{field: value})
    assert len(str(error.value)) < 200
    with pytest.raises(ValueError, match="SamplingParams.stop_token_ids holds .*; each entry must"):
        SamplingParams(stop_token_ids=[value])


def test_replaced_params_are_equal():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), stop="x")
    assert dataclasses.replace(params) == params
