"""A model that says what a test tells it to, so that exact texts can go through the whole engine.

It is an ordinary module to `LLM` and `Engine`. The token after position p is `script[p]`, whatever
the prompt's tokens are; nothing is attended.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.config import ModelConfig
from jpaged.llm import LLM
from jpaged.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 256


class ScriptedModel(nnx.Module):
    """Greedy decoding of it replays a script."""

    def __init__(self, script: Sequence[int], vocab_size: int, *, eos_token_ids: tuple[int, ...]):
        self.config = ModelConfig(
            architecture="Scripted",
            vocab_size=vocab_size,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            max_position_embeddings=MAX_MODEL_LEN,
            eos_token_ids=eos_token_ids,
        )
        padded = np.zeros(MAX_MODEL_LEN, np.float32)
        padded[: len(script)] = script
        self.script = nnx.Param(jnp.asarray(padded))

    def __call__(self, token_ids, positions, kv_cache, inputs):
        return self.script[...][positions][:, None], kv_cache

    def logits(self, hidden):
        vocab = jnp.arange(self.config.vocab_size, dtype=jnp.float32)
        return -100.0 * jnp.abs(hidden - vocab[None])


def scripted_llm(tokenizer: Tokenizer, answer: Sequence[int], *, num_prompt_tokens: int = 1) -> LLM:
    """An `LLM` that answers prompts of that many tokens with `answer`."""
    script = [0] * (num_prompt_tokens - 1) + list(answer)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    model = ScriptedModel(script, tokenizer.vocab_size, eos_token_ids=eos)
    return LLM(
        model,
        tokenizer=tokenizer,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_MODEL_LEN,
        mixed_buckets=(MAX_MODEL_LEN,),
    )
