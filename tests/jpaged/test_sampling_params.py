import dataclasses
from collections.abc import Iterator
from fractions import Fraction

import jaxtyping
import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams, read_generation_config


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
        ("n", 0),
        ("n", 16385),
        ("n", 2.0),
        ("best_of", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", None),
        ("temperature", 2.1),
        ("temperature", 1e300),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("presence_penalty", -2.5),
        ("presence_penalty", 2.5),
        ("presence_penalty", None),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", [5]),
        ("logit_bias", "x"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [1.5]),
        ("bad_words", [""]),
        ("bad_words", ["a", 5]),
        ("bad_words", 5),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("prompt_logprob_start", -1),
        ("extra_args", 5),
        ("detokenize", 0),
        ("skip_reading_prefix_cache", None),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [5, -1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**63]),
        ("max_tokens", np.int64(-1)),
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
        ("stop_token_ids", 0),
        ("stop_token_ids", "7"),
        ("ignore_eos", 1),
    ],
)
def test_value_out_of_range_is_refused_with_field_and_value(field, value):
    with pytest.raises(ValueError, match=f"SamplingParams.{field}") as error:
        SamplingParams(**{field: value})
    is_entry = isinstance(value, list) and value and field not in ("logit_bias", "extra_args")
    at_fault = value[-1] if is_entry else value
    shown = "()" if isinstance(value, list) and not value else repr(at_fault)
    assert shown in str(error.value)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 1.0, "5": 2.0}),
        ("logit_bias", {"5": 1.0, "05": 2.0}),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"1.0": 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"9" * 30: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: -101}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: None}),
        ("extra_args", {"a": "x"}),
        ("extra_args", {"a": [1.0, float("inf")]}),
        ("extra_args", {5: 1.0}),
        ("extra_args", {"a": 1e39}),
        ("extra_args", {"a": float("nan")}),
    ],
)
def test_bad_entry_of_a_mapping_is_refused_with_field_and_entry(field, bad):
    with pytest.raises(ValueError, match=f"SamplingParams.{field} holds .*; each entry must"):
        SamplingParams(**{field: bad})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be at least n, which is 3"),
        ({"n": 2, "temperature": 0.0}, "n is 2; it must be 1 at temperature 0"),
        ({"n": 2, "temperature": 1e-6}, "n is 2; it must be 1 at temperature 0"),
        ({"best_of": 2, "temperature": 0.0}, "best_of is 2; it must be 1 at temperature 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be at most max_tokens, 4"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "max_tokens is 0"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start is 3; it must be 0 without"),
        ({"stop": "x", "detokenize": False}, "stop is .*; it must be empty where detokenize"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_field_that_is_not_offered_is_refused_by_name():
    with pytest.raises(TypeError, match="'logprob_token_ids'"):
        SamplingParams(logprob_token_ids=[1])


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature) == (1, 16, 0, 1.0)
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.repetition_penalty, params.seed, params.logprobs) == (1.0, None, None)
    assert params.skip_special_tokens and params.spaces_between_special_tokens and params.detokenize
    assert not params.ignore_eos and not params.include_stop_str_in_output


def test_seed_of_minus_one_means_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=np.int64(-1)).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_nothing_given_is_the_same_as_an_empty_list():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert params == SamplingParams() == SamplingParams(stop=[], stop_token_ids=(), bad_words=[])


def test_mappings_are_copied_and_keys_of_json_become_ids():
    bias = {"5": 1, np.int64(7): np.float32(-2.0)}
    params = SamplingParams(logit_bias=bias, extra_args={"a": 1, "b": (2, np.float64(3))})
    bias["9"] = 1
    assert params.logit_bias == {5: 1.0, 7: -2.0}
    assert params.extra_args == {"a": (1.0,), "b": (2.0, 3.0)}


def test_sampling_below_1e_5_is_greedy_as_in_vllm():
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1.1e-5).is_greedy


def test_defaults_of_a_model_come_from_its_generation_config():
    config = {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01,
        "repetition_penalty": 1.1, "max_new_tokens": 99, "eos_token_id": [1, 2], "pad_token_id": 0,
        "presence_penalty": None,
    }  # fmt: skip
    assert read_generation_config(config) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "max_tokens": 99,
    }  # fmt: skip
    assert read_generation_config({}) == {}
    with pytest.raises(ValueError, match=r"generation_config.json: SamplingParams.top_p is 2.0"):
        read_generation_config({"top_p": 2.0})


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
        ("n", np.int64(2)),
        ("min_p", np.float32(0.5)),
        ("presence_penalty", 1),
        ("prompt_logprobs", np.int8(-1)),
        ("top_p", Fraction(1, 4)),
    ],
)
def test_any_number_is_taken_and_kept_as_plain_python(field, value):
    params = SamplingParams(**{field: value})
    kept = getattr(params, field)
    assert kept == value
    is_float = field in ("temperature", "top_p", "min_p", "presence_penalty")
    assert type(kept) is (float if is_float else int)


def test_ids_of_numpy_are_kept_as_plain_python():
    ids = SamplingParams(stop_token_ids=list(np.array([3, 4]))).stop_token_ids
    assert ids == (3, 4) and {type(token_id) for token_id in ids} == {int}
    for field in ("stop_token_ids", "allowed_token_ids"):
        assert getattr(SamplingParams(**{field: np.array([0])}), field) == (0,)


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
