import json
import logging

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive
from tests.invariance.engines import Job, answer, open_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPT = np.random.default_rng(19).integers(0, 256, 20).tolist()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write(directory, *, tied: bool, head: np.ndarray | None):
    """A checkpoint whose config says `tied`, with the given head in its file."""
    tiny_models.write_tiny_model(directory, "tied" if tied else "gqa")
    tensors = tiny_models.tiny_weights("tied")
    if head is not None:
        tensors[HEAD] = head
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] == tied
    return tensors


def assert_head(engine, tensors, head: np.ndarray) -> None:
    """The engine answers as the naive model with that head does."""
    config = tiny_models.tiny_config("gqa")  # not tied
    model = naive.Naive(config, tensors | {HEAD: head})
    [request] = answer(engine, [Job(PROMPT, PARAMS)])
    naive.assert_answer(model, PROMPT, PARAMS, request.output_token_ids, request.token_logprobs)


EMBEDDING_TABLE = tiny_models.tiny_weights("tied")[EMBEDDING]
OTHER_TABLE = tiny_models.tiny_weights("gqa")[HEAD]


@pytest.mark.parametrize(
    ("tied", "in_file", "used"),
    [
        pytest.param(True, None, EMBEDDING_TABLE, id="a: tied, no head"),
        pytest.param(True, EMBEDDING_TABLE, EMBEDDING_TABLE, id="b: tied, equal head"),
        pytest.param(True, OTHER_TABLE, OTHER_TABLE, id="c: tied, another head"),
        pytest.param(False, OTHER_TABLE, OTHER_TABLE, id="e: not tied, a head"),
    ],
)
def test_h19_head_is_the_one_that_transformers_takes(tied, in_file, used, tmp_path, caplog):
    """H-19: a head in the file is never thrown away; one that contradicts the config is told."""
    tensors = write(tmp_path, tied=tied, head=in_file)
    with caplog.at_level(logging.WARNING):
        engine = open_engine(tmp_path)
    contradicts = tied and in_file is OTHER_TABLE
    assert any("tie_word_embeddings" in record.message for record in caplog.records) == contradicts
    assert_head(engine, tensors, used)


def test_h19_missing_head_is_refused_by_name(tmp_path):
    """H-19 d: not tied and no head; it must not stay uninitialised."""
    write(tmp_path, tied=False, head=None)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        open_engine(tmp_path)
