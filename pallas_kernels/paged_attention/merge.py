"""Merges the partial results of split work into outputs.

A partial result is a softmax over a part of the tokens, with the logarithm of its sum; parts are
weighed by their sums (FlashDecoding). Tokens whose item wrote their output itself are left alone,
padding is set to zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.inputs import AttentionInputs, unpack_plan
from pallas_kernels.paged_attention.tiles import LOG2_E, MASKED

_HEADS = 16  # query heads per program


def result_shapes(
    q: Float[Array, "T N H"], inputs: AttentionInputs, *, return_log_sum_exp: bool
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the kernels of a step write for `merge_partials`, each for the tokens of its items.

    Outputs `[T, N, H]` of tokens without partial results; partial outputs `[R, N, H]`, each
    normalised, and the base-2 logarithms of their softmax sums `[R, N]`; on request the natural
    logarithms of the tokens' softmax sums `[T, N]`, for the same tokens as outputs.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_partials = unpack_plan(inputs)[1].merge_rows.shape[0]
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((num_partials, num_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_partials, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
    )
    return shapes if return_log_sum_exp else shapes[:3]


def merge_partials(
    results: tuple[Array, ...], inputs: AttentionInputs, *, sinks: Float[Array, " N"] | None
) -> Float[Array, "T N H"] | tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Writes the outputs of tokens that have partial results, in place.

    Args:
        results: As `result_shapes` lists them.
        inputs: The step; the plan says which partial results are whose.
        sinks: As in `paged_attention`.

    Returns:
        Outputs and, if they are among the results, the logarithms of the tokens' softmax sums.
    """
    out, partials, log_sums, *log_sum_exp = results
    num_tokens, num_heads, head_dim = out.shape
    _, arrays, kernels = unpack_plan(inputs)
    operands = [
        arrays.merge_starts,
        arrays.merge_rows,
        inputs.query_start_loc,
        partials,
        log_sums,
        jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        out,
        *log_sum_exp,
    ]
    num_operands = len(operands)
    written = operands[6:]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _kernel,
        num_heads=num_heads,
        head_dim=head_dim,
        num_rows=inputs.seq_lens.shape[0],
        has_sinks=sinks is not None,
    )
    merged = pl.pallas_call(
        # Results come as inputs too; they are written only.
        lambda *refs: kernel(*refs[:6], *refs[num_operands:]),
        grid=(num_tokens, pl.cdiv(num_heads, _HEADS)),
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(written),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={6 + i: i for i in range(len(written))},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=kernels.interpret,
        name="paged_attention_merge",
    )(*operands)
    return tuple(merged) if log_sum_exp else merged[0]


def _kernel(
    starts_ref,
    rows_ref,
    query_start_loc_ref,
    partial_ref,
    log_sum_ref,
    sinks_ref,
    out_ref,
    log_sum_exp_ref=None,
    *,
    num_heads: int,
    head_dim: int,
    num_rows: int,
    has_sinks: bool,
):
    token = pl.program_id(0)
    heads = pl.program_id(1) * _HEADS + jnp.arange(_HEADS)
    is_head = heads < num_heads
    width = 1 << (head_dim - 1).bit_length()
    columns = jnp.arange(width)
    mask = is_head[:, None] & (columns < head_dim)[None, :]
    begin, end = starts_ref[token], starts_ref[token + 1]
    is_padding = token >= query_start_loc_ref[num_rows]

    @pl.when((end > begin) | is_padding)
    def _():
        def add(place, carry):
            values, peak, total = carry
            row = rows_ref[place]
            log_sum = plt.load(log_sum_ref.at[row, heads], mask=is_head, other=0.0)
            part = plt.load(
                partial_ref.at[row, heads[:, None], columns[None, :]], mask=mask, other=0.0
            )
            new_peak = jnp.maximum(peak, log_sum)
            shrink, weight = jnp.exp2(peak - new_peak), jnp.exp2(log_sum - new_peak)
            values = values * shrink[:, None] + part * weight[:, None]
            return values, new_peak, total * shrink + weight

        values = jnp.zeros((_HEADS, width), jnp.float32)
        peak = jnp.full(_HEADS, MASKED, jnp.float32)
        total = jnp.zeros(_HEADS, jnp.float32)
        values, peak, total = jax.lax.fori_loop(begin, end, add, (values, peak, total))
        if has_sinks:
            sink = plt.load(sinks_ref.at[heads], mask=is_head, other=0.0) * LOG2_E
            new_peak = jnp.maximum(peak, sink)
            shrink = jnp.exp2(peak - new_peak)
            values, total = values * shrink[:, None], total * shrink + jnp.exp2(sink - new_peak)
            peak = new_peak
        if log_sum_exp_ref is not None:
            log_sum_exp = (peak + jnp.log2(total)) * (1 / LOG2_E)
            plt.store(
                log_sum_exp_ref.at[token, heads],
                jnp.where(is_padding, -jnp.inf, log_sum_exp),
                mask=is_head,
            )
        values = values / jnp.where(total > 0.0, total, 1.0)[:, None]
        plt.store(
            out_ref.at[token, heads[:, None], columns[None, :]],
            values.astype(out_ref.dtype),
            mask=mask,
        )
