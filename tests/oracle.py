"""How an answer is compared with a golden one."""

from collections.abc import Mapping, Sequence
from typing import Any

# The reference's two best logits closer than this: either token is right.
NEAR_TIE = 1e-3


def assert_same_answer(
    golden: Mapping[str, Any],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    logprob_tolerance: float = 1e-3,
) -> None:
    """Asserts that an answer is the golden one, up to a near-tie.

    Args:
        golden: One of a golden file's "answers".
        token_ids: Must equal the golden ids; after a difference at a near-tie, where both
            answers are right, nothing is compared.
        logprobs: If given, of each id; compared with the golden ones.
        logprob_tolerance: How far they may lie apart.
    """
    assert len(token_ids) == len(golden["token_ids"])
    for step, expected in enumerate(golden["token_ids"]):
        margin = golden["margins"][step]
        if token_ids[step] != expected:
            assert margin < NEAR_TIE, (
                f"step {step}: token {token_ids[step]}, expected {expected}, which the reference "
                f"preferred by {margin}; tokens {list(token_ids)}"
            )
            return
        if logprobs is not None:
            difference = abs(logprobs[step] - golden["logprobs"][step])
            assert difference <= logprob_tolerance, (
                f"step {step}: log-probability {logprobs[step]}, expected "
                f"{golden['logprobs'][step]}"
            )
