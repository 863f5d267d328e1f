import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.sampling_params import SamplingParams

pytestmark = pytest.mark.optimized

LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "decode_buckets": (2,),
    "mixed_buckets": (12,),
}
NUM_BLOCKS = 1024


@pytest.fixture(scope="module")
def engine(tiny_model):
    with open_checkpoint(tiny_model("gqa")) as checkpoint:
        engine = Engine.from_checkpoint(checkpoint, EngineConfig(num_blocks=NUM_BLOCKS, **LIMITS))
    engine.warm_up()
    return engine


def test_every_program_updates_cache_and_counts_in_place(engine):
    assert_in_place(engine)


def assert_in_place(engine: Engine) -> None:
    """Both are aliased as a whole, and no temporary is as large as one layer of the pool."""
    layers = [layer.nbytes for layer in engine.runner.kv_cache]
    assert min(layers) > 4 << 20  # far more than any activation of the tiny model
    for bucket in engine.runner.buckets:
        analysis = engine.runner.program(bucket).memory_analysis()
        counts_bytes = engine.runner.sampling_state.counts.nbytes
        assert analysis.alias_size_in_bytes >= sum(layers) + counts_bytes, bucket
        assert analysis.temp_size_in_bytes < min(layers) // 4, bucket


def test_a_step_donates_the_cache(engine):
    before = engine.runner.kv_cache
    engine.add_request("donates", [1, 2, 3], SamplingParams(max_tokens=1))
    counts = engine.runner.sampling_state.counts
    engine.step()
    assert all(array.is_deleted() for array in (*before, counts))
    assert not engine.runner.has_lost_state
    engine.runner.sampling_state.counts.delete()
    assert engine.runner.has_lost_state
    engine.runner.allocate(NUM_BLOCKS)


def test_nothing_compiles_after_warm_up_and_every_bucket_is_used(engine):
    random = np.random.default_rng(0)
    used = set()
    for wave in range(30):
        for index in range(int(random.integers(1, 7))):
            prompt = random.integers(0, 256, int(random.integers(1, 60))).tolist()
            params = SamplingParams(
                max_tokens=int(random.integers(1, 12)),
                temperature=float(random.choice([0.0, 1.0])),
                top_p=float(random.choice([0.5, 1.0])),
                logprobs=[None, 0, 5][int(random.integers(3))],
                presence_penalty=float(random.choice([0.0, 0.5])),
                logit_bias=[None, {3: 1.0}][int(random.integers(2))],
                prompt_logprobs=[None, None, 1][int(random.integers(3))],
            )
            engine.add_request(f"{wave}-{index}", prompt, params)
        for _ in range(int(random.integers(1, 12))):
            engine.step()
            used.add(engine.last_bucket)
    while engine.has_unfinished_requests:
        engine.step()
        used.add(engine.last_bucket)
    assert engine.compilations_after_warm_up == 0
    assert used == set(engine.runner.buckets)
    engine.scheduler.check()


def test_the_counter_sees_what_was_not_warmed_up(tiny_model):
    with open_checkpoint(tiny_model("gqa")) as checkpoint:
        engine = Engine.from_checkpoint(checkpoint, EngineConfig(num_blocks=NUM_BLOCKS, **LIMITS))
    engine.warm_up(engine.runner.buckets.decode)
    engine.add_request("a", [1], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.compilations_after_warm_up == 0
    engine.add_request("b", [1] * 40, SamplingParams(max_tokens=2))
    engine.step()
    assert engine.compilations_after_warm_up == 1


def test_blocks_are_copied_whole_and_nothing_else_changes(engine):
    runner = engine.runner
    random = np.random.default_rng(0)
    values = [random.standard_normal(x.shape, np.float32) for x in runner.kv_cache]
    runner.kv_cache = tuple(map(jnp.asarray, values))
    block_ids = (random.permutation(NUM_BLOCKS) + 1).tolist()
    # More than one batch of copies; one source may have many destinations.
    copies = [(block_ids[i // 2], block_ids[30 + i]) for i in range(37)]
    runner.copy_blocks(copies)
    for before, after in zip(values, runner.kv_cache, strict=True):
        expected = before.copy()
        for source, destination in copies:
            expected[destination] = before[source]
        np.testing.assert_array_equal(after[1:], expected[1:])


def test_leaves_are_the_modules_own_arrays(tiny_model):
    with open_checkpoint(tiny_model("gqa")) as checkpoint:
        module = Engine.from_checkpoint(checkpoint, EngineConfig(num_blocks=8)).runner.model()
    leaves = jax.tree.leaves(nnx.state(module))
    engine = Engine(module, EngineConfig(num_blocks=8, **LIMITS | {"max_model_len": 64}))
    for ours, theirs in zip(engine.runner.leaves, leaves, strict=True):
        assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    engine.close()
    assert not any(leaf.is_deleted() for leaf in leaves)


def test_layers_that_share_an_array_update_it_in_place(tiny_model):
    """Of Gemma 3's three KV groups, every layer is the first: all write into one array in turn."""
    with open_checkpoint(tiny_model("gemma3")) as checkpoint:
        engine = Engine.from_checkpoint(checkpoint, EngineConfig(num_blocks=NUM_BLOCKS, **LIMITS))
    engine.runner.compile(engine.runner.buckets)
    assert len(engine.runner.kv_cache) == 1 and len(engine.model_config.kv_groups) == 3
    assert_in_place(engine)
