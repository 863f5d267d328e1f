"""Times the matrix products of a step alone: the part that no scheduling can save."""

import time

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.layers.linear import Linear, matmul
from jpaged.runner.model_runner import ModelRunner
from jpaged.runner.step_inputs import Bucket


def time_products(runner: ModelRunner, bucket: Bucket, *, repeats: int = 5) -> float:
    """Best seconds for all products of one step of a bucket, head included, in layer order."""
    model = runner.model()
    config = runner.config
    linears = [
        module
        for layer in model.layers
        for _, module in nnx.iter_modules(layer)
        if isinstance(module, Linear)
    ]
    head = model.embed if model.lm_head is None else model.lm_head
    weights = [w[...].reshape(-1, w.shape[-1]) for w in (linear.weight for linear in linears)]

    @jax.jit
    def products(weights, head, x):
        # Each product's input depends on the one before, as in a step.
        for w in weights:
            width = w.shape[1]
            h = jnp.tile(x, (1, -(-width // x.shape[1])))[:, :width]
            x = x + matmul(h, w)[:, :1] * 1e-6
        return matmul(x[: bucket.num_rows], head)

    x = jnp.ones((bucket.num_tokens, config.hidden_size), runner.dtype)
    head = head.weight[...].reshape(config.vocab_size, -1)
    products(weights, head, x).block_until_ready()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        products(weights, head, x).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times)
