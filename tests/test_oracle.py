import pytest

from tests.oracle import assert_same_answer

GOLDEN = {"token_ids": [5, 6, 7], "logprobs": [-0.1, -0.2, -0.3], "margins": [2.0, 0.0005, 3.0]}


def test_answers_may_part_only_at_a_near_tie():
    assert_same_answer(GOLDEN, [5, 6, 7])
    assert_same_answer(GOLDEN, [5, 9, 9])
    with pytest.raises(AssertionError, match="step 0: token 9, expected 5"):
        assert_same_answer(GOLDEN, [9, 6, 7])
    with pytest.raises(AssertionError, match="step 2"):
        assert_same_answer(GOLDEN, [5, 6, 9])


def test_answers_of_another_length_differ():
    with pytest.raises(AssertionError):
        assert_same_answer(GOLDEN, [5, 6])


def test_log_probabilities_are_compared_up_to_the_parting():
    assert_same_answer(GOLDEN, [5, 6, 7], [-0.1005, -0.2, -0.3])
    assert_same_answer(GOLDEN, [5, 9, 9], [-0.1, -4.0, -4.0])
    with pytest.raises(AssertionError, match="step 2: log-probability"):
        assert_same_answer(GOLDEN, [5, 6, 7], [-0.1, -0.2, -0.302])
