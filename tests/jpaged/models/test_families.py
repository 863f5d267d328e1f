"""Tiny models of every family: equal to transformers, and the same however they are served."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.loader import load_model
from jpaged.models.registry import FAMILIES, find_family
from jpaged.models.transformer import Transformer
from jpaged.sampling_params import SamplingParams
from pallas_kernels.paged_attention import AttentionInputs
from tests import tiny_models
from tests.invariance.engines import Job, answer, assert_naive, shared_engine, small_pool
from tests.oracle import assert_same_answer

BLOCK_SIZE = 16
VARIANTS = [*tiny_models.FAMILY_VARIANTS]


def load(directory, max_model_len: int) -> Transformer:
    with open_checkpoint(directory) as checkpoint:
        config = replace(checkpoint.model_config, max_model_len=max_model_len)
        model = nnx.eval_shape(lambda: Transformer(config, dtype=np.dtype(np.float32)))
        sources = find_family(config.architecture).leaf_sources(config)
        return load_model(model, checkpoint, sources)


def all_logits(model: Transformer, token_ids: list[int]) -> np.ndarray:
    """By the module alone, in one pass; each KV group has blocks of its own."""
    config, num_tokens = model.config, len(token_ids)
    num_groups = len(config.kv_groups)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    positions = np.arange(num_tokens, dtype=np.int32)
    shape = (num_groups * num_blocks + 1, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)

    @jax.jit
    def forward(token_ids, inputs):
        cache = tuple(
            jnp.full(shape, jnp.nan, jnp.float32) for _ in range(config.num_cached_layers)
        )
        hidden, _ = model(token_ids, inputs[0].positions, cache, inputs)
        return model.logits(hidden)

    inputs = tuple(
        AttentionInputs(
            positions=positions,
            slot_mapping=positions + (1 + group * num_blocks) * BLOCK_SIZE,
            query_start_loc=np.array([0, num_tokens], np.int32),
            seq_lens=np.array([num_tokens], np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None] + 1 + group * num_blocks,
        )
        for group in range(num_groups)
    )
    return np.asarray(forward(np.array(token_ids, np.int32), inputs))


@pytest.mark.optimized
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_at_every_position(variant, tiny_model, goldens):
    for golden in goldens(f"tiny-{variant}")["sequences"]:
        model = load(tiny_model(variant), max_model_len=len(golden["token_ids"]))
        ours = all_logits(model, golden["token_ids"])[:, golden["shown_ids"]]
        np.testing.assert_allclose(ours, golden["logits"], atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_transformers_and_of_the_naive_oracle(variant, tiny_model, goldens):
    """In a pool that a few of them fill: chunked, preempted, and once more with cached prefixes."""
    options = small_pool(tiny_model(variant))
    engine = shared_engine(tiny_model(variant), **options)
    answers = goldens(f"tiny-{variant}").get("answers", [])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    jobs = [Job(golden["prompt_token_ids"], params) for golden in answers]
    # Past every window, and beyond the lengths of training that there are.
    random = np.random.default_rng(7)
    lengths = (8, 8, 8, 8, 30, 70, 90, 100)
    jobs += [Job(random.integers(0, 256, length).tolist(), params) for length in lengths]
    before = engine.scheduler.num_preemptions
    requests = answer(engine, jobs)
    assert engine.scheduler.num_preemptions > before
    for golden, request in zip(answers, requests, strict=False):
        assert_same_answer(golden, request.output_token_ids, request.token_logprobs)
    assert_naive(requests, variant, max_model_len=options["max_model_len"])
    again = answer(engine, jobs[-1:])
    assert again[0].num_cached_tokens > 0
    assert_naive(again, variant, max_model_len=options["max_model_len"])


@pytest.mark.parametrize("variant", [*tiny_models.VARIANTS, *VARIANTS])
def test_leaves_give_their_tensors_back(variant, tiny_model):
    with open_checkpoint(tiny_model(variant)) as checkpoint:
        config = checkpoint.model_config
        names = set()
        for source in find_family(config.architecture).leaf_sources(config).values():
            tensors = [checkpoint.read(name) for name in source.tensors]
            parts = source.split(source.build(*tensors))
            for name, tensor, part in zip(source.tensors, tensors, parts, strict=True):
                np.testing.assert_array_equal(part, tensor, err_msg=name)
            names |= set(source.tensors)
        assert names == set(checkpoint.shapes)


def test_every_family_has_a_tiny_model():
    variants = [tiny_models.tiny_config(name) for name in (*tiny_models.VARIANTS, *VARIANTS)]
    assert {config["architectures"][0] for config in variants} == set(FAMILIES)
