import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tests import tiny_models


@pytest.mark.parametrize("variant", [*tiny_models.VARIANTS, *tiny_models.FAMILY_VARIANTS])
def test_weights_are_those_that_the_goldens_were_made_with(variant, goldens):
    digest = tiny_models.weights_sha256(tiny_models.tiny_weights(variant))
    assert digest == goldens(f"tiny-{variant}")["weights_sha256"]


def test_sharded_model_holds_the_tensors_of_the_single_file(tiny_model):
    directory: Path = tiny_model("biases", num_shards=3)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    weights = tiny_models.tiny_weights("biases")
    assert index["weight_map"].keys() == weights.keys()
    assert len(set(index["weight_map"].values())) == 3
    for name, file_name in index["weight_map"].items():
        with safe_open(directory / file_name, "numpy") as shard:
            np.testing.assert_array_equal(shard.get_tensor(name), weights[name])


def test_tokenizer_gives_every_byte_its_own_id(tiny_model):
    tokenizer = Tokenizer.from_file(str(tiny_model("gqa") / "tokenizer.json"))
    text = "".join(map(chr, range(0x800))) + "e\u0301 日本 👩‍👩‍👧‍👦"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    for index, token in enumerate(tiny_models.SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == tiny_models.NUM_BYTES + index
    assert tokenizer.get_vocab_size() == tiny_models.NUM_TOKENS_KNOWN


def test_padded_vocabulary_would_win_if_it_could_be_sampled():
    head = tiny_models.tiny_weights("padded-vocab")["lm_head.weight"]
    known = head[: tiny_models.NUM_TOKENS_KNOWN]
    padding = head[tiny_models.NUM_TOKENS_KNOWN :]
    hidden = np.random.Generator(np.random.PCG64(0)).standard_normal((100, head.shape[1]))
    assert ((hidden @ padding.T).max(axis=1) > (hidden @ known.T).max(axis=1)).mean() > 0.9
