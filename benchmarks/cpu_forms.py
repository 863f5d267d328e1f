"""How CPUs should multiply and attend: the measurements behind three modules.

    python -m benchmarks.cpu_forms products     # jpaged/layers/linear.py
    python -m benchmarks.cpu_forms logits       # the same, and jpaged/runner/sampler.py
    python -m benchmarks.cpu_forms attention    # pallas_kernels/paged_attention/{cpu,xla}.py

Shapes are SmolLM2-135M's. Each form runs over the weights or pools of several layers in turn, so
that they come from memory. Quiet machines only; compare within one run.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.layers.linear import matmul, matmul_weight_left
from jpaged.runner.huge_pages import use_huge_pages
from jpaged.runner.sampler import find_largest, find_logprobs
from pallas_kernels.paged_attention import AttentionInputs, xla
from pallas_kernels.paged_attention.cpu import paged_attention_cpu

FORMS: dict[str, Callable[..., Any]] = {
    "x @ w.T": lambda x, w: x @ w.T,
    "weight left": matmul_weight_left,
    "jpaged": matmul,
}
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, LAYERS = 3, 3, 64, 16, 12


def best_us(function: Callable[..., Any], *arguments: Any, repeats: int = 15) -> float:
    """Best microseconds of a jitted call, compilation apart."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - started)
    return min(times) * 1e6


def products() -> None:
    """Prints GFLOP/s of `x @ w.T` in its forms, by number of rows; jpaged chooses one."""
    rng = np.random.default_rng(0)
    width, out = 576, 1536
    weights = [
        jnp.asarray(rng.standard_normal((out, width), dtype=np.float32) * 0.02) for _ in range(24)
    ]

    def chain(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, weights):
            for w in weights:
                x = x + form(x, w)[:, :width] * 1e-3
            return x

        return jax.jit(run)

    print(f"{width} x {out}, float32, GFLOP/s")
    for rows in (1, 4, 8, 16, 64, 128, 256, 512):
        x = jnp.asarray(rng.standard_normal((rows, width), dtype=np.float32))
        flops = 2 * rows * width * out * len(weights)
        speeds = {
            name: flops / best_us(chain(form), x, weights) / 1e3 for name, form in FORMS.items()
        }
        print(f"{rows:4} rows  " + "  ".join(f"{n} {s:5.1f}" for n, s in speeds.items()))


def logits() -> None:
    """Prints milliseconds of logits with log-probabilities, and of finding the 20 largest."""
    rng = np.random.default_rng(0)
    width, vocab_size = 576, 49152
    head = jnp.asarray(rng.standard_normal((vocab_size, width), dtype=np.float32) * 0.05)

    def score(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, head, ids):
            return find_logprobs(
                form(x, head),
                ids,
                num_alternatives=20,
                normalize=True,
                wants_alternatives=jnp.array(True),
            )

        return jax.jit(run)

    print(f"{width} x {vocab_size}, float32, ms")
    for rows in (16, 32, 64, 256):
        x = jnp.asarray(rng.standard_normal((rows, width), dtype=np.float32))
        ids = jnp.arange(rows, dtype=jnp.int32)
        times = {name: best_us(score(form), x, head, ids) for name, form in FORMS.items()}
        values = x @ head.T
        times["lax.top_k"] = best_us(jax.jit(lambda v: jax.lax.top_k(v, 20)), values)
        times["find_largest"] = best_us(jax.jit(lambda v: find_largest(v, 20)), values)
        print(f"{rows:4} rows  " + "  ".join(f"{n} {t / 1e3:6.1f}" for n, t in times.items()))


def whole_context(q, kv_cache_layer, inputs, *, scale):
    """The obvious form: gather every row's whole context, then two batched products."""
    kv = kv_cache_layer[inputs.block_tables].transpose(3, 0, 2, 1, 4, 5)  # [2, B, K, M, S, H]
    _, rows, heads, _, _, head_dim = kv.shape
    k, v = kv.reshape(2, rows, heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bkch->bkgc", q.reshape(rows, heads, -1, head_dim) * scale, k)
    is_visible = jnp.arange(k.shape[2])[None] < inputs.seq_lens[:, None]
    scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
    out = jnp.einsum("bkgc,bkch->bkgh", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(q.shape)


def attention() -> None:
    """Prints microseconds a layer of decode and mixed steps, by form and sizes."""
    rng = np.random.default_rng(0)
    num_blocks = 16 * 24 + 1
    shape = (num_blocks, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
    pools = [jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in range(LAYERS)]
    use_huge_pages(pools, are_written=True)
    decode = make_inputs(rng, rng.integers(60, 330, 16), np.ones(16, int), 16, num_blocks)
    lens = np.full(13, 200)
    chunks = np.array([1] * 11 + [144, 100])
    mixed = make_inputs(rng, np.maximum(lens, chunks), chunks, 256, num_blocks)

    def run(name: str, inputs: AttentionInputs, form: Callable[..., Any]) -> None:
        num_tokens = inputs.positions.shape[0]
        q = jnp.ones((num_tokens, KV_HEADS * GROUP, HEAD_DIM), jnp.float32)

        @jax.jit
        def layers(q, pools, inputs):
            for pool in pools:
                q = q + 1e-3 * form(q, pool, inputs, scale=0.125)
            return q

        print(f"{name:48} {best_us(layers, q, pools, inputs) / LAYERS:7.0f} us a layer", flush=True)

    run("decode 16, whole context at once", decode, whole_context)
    for rows, chunk in ((1, 128), (4, 128), (8, 64), (8, 128)):
        xla.ROWS, xla.ROW_CHUNK = rows, chunk
        run(f"decode 16, xla, {rows} rows, pieces of {chunk}", decode, xla.paged_attention_xla)
    run("decode 16, compiled loop", decode, paged_attention_cpu)
    for tile, chunk in ((32, 64), (64, 64), (64, 128), (128, 128)):
        xla.TILE, xla.TILE_CHUNK = tile, chunk
        run(f"mixed 256, xla, tiles of {tile}, pieces of {chunk}", mixed, xla.paged_attention_xla)
    run("mixed 256, compiled loop", mixed, paged_attention_cpu)


def make_inputs(
    rng: np.random.Generator,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    num_tokens: int,
    num_blocks: int,
) -> AttentionInputs:
    """A ragged batch whose blocks lie in no order."""
    rows = 16
    tables = np.zeros((rows, 24), np.int32)
    free = list(rng.permutation(num_blocks - 1) + 1)
    for row, length in enumerate(seq_lens):
        count = -(-int(length) // BLOCK_SIZE)
        tables[row, :count] = [free.pop() for _ in range(count)]
    starts = np.full(rows + 1, query_lens.sum(), np.int32)
    starts[0] = 0
    starts[1 : len(query_lens) + 1] = np.cumsum(query_lens)
    lens = np.zeros(rows, np.int32)
    lens[: len(seq_lens)] = seq_lens
    unused = jnp.zeros(num_tokens, jnp.int32)
    return AttentionInputs(
        unused, unused, jnp.asarray(starts), jnp.asarray(lens), jnp.asarray(tables)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("products", "logits", "attention"))
    {"products": products, "logits": logits, "attention": attention}[parser.parse_args().what]()
