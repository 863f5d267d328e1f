import pytest

from jpaged.sampling_params import SamplingParams


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
