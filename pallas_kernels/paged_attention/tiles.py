"""What the GPU kernels share: which tiles of keys an item reads, and numbers they agree on.

Plain arithmetic on integers, traced inside the kernels.
"""

import math

import jax.numpy as jnp
from jax import lax

LOG2_E = math.log2(math.e)
MASKED = -1e30  # a logit that no softmax sees; finite, so that its difference to itself is 0


def tile_range(kv_begin, kv_end, first, *, tile_tokens: int, window: int | None):
    """First tile of an item, the one behind its last, and the first token that it sees.

    A plan that knows nothing of the window may have items that see nothing: they have no tiles.

    Args:
        kv_begin: Of the item's range, a multiple of `tile_tokens`.
        kv_end: Of the range.
        first: Position of the item's first token.
        tile_tokens: Tokens of a tile.
        window: As in `paged_attention`.
    """
    first_seen = kv_begin
    if window is not None:
        first_seen = jnp.maximum(kv_begin, first - window + 1)
    end = lax.div(kv_end + (tile_tokens - 1), tile_tokens)
    return jnp.minimum(lax.div(first_seen, tile_tokens), end), end, first_seen


def full_range(begin, end, kv_end, first, last, *, tile_tokens: int, window: int | None):
    """Those tiles between `begin` and `end` of which all tokens see everything.

    Args:
        begin: As `tile_range` returns it.
        end: Likewise.
        kv_end: Of the item's range.
        first: Position of the first token.
        last: Position of the last token.
        tile_tokens: Tokens of a tile.
        window: As in `paged_attention`.
    """
    full_begin = begin
    if window is not None:
        full_begin = lax.div(jnp.maximum(last - window + tile_tokens, 0), tile_tokens)
        full_begin = jnp.minimum(jnp.maximum(full_begin, begin), end)
    full_end = lax.div(jnp.minimum(kv_end, first + 1), tile_tokens)
    return full_begin, jnp.minimum(jnp.maximum(full_end, full_begin), end)
