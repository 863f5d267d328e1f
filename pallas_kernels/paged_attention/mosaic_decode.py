"""Decode items through Mosaic GPU: few rows per item, so that reading the cache is the work.

Two forms. With 16 rows `mma` wastes the least, runs on every chip from sm_90 on, and up to
head_dim 128 two thread blocks share an SM. With 64 rows `wgmma`, on sm_90 only, reads keys and
values straight from shared memory and takes the longer chunks too. Which is quicker is not
measured.
"""

from pallas_kernels.paged_attention.mosaic_kernel import Form

RING_BYTES = 96 * 1024  # of keys and values on their way, if two tiles are no more
TILE_TOKENS = 64


def decode_form(num_rows: int, head_dim: int) -> Form:
    """The form for items of so many rows.

    Raises:
        ValueError: If `num_rows` is neither 16 nor 64, or 64 and registers would spill.
    """
    products = {16: "mma", 64: "wgmma"}
    if num_rows not in products:
        raise ValueError(f"decode_rows is {num_rows}; Mosaic takes 16 or 64")
    if num_rows == 64 and head_dim > 128:
        raise ValueError(
            f"decode_rows is 64; with head_dim {head_dim} Mosaic takes 16, since 64 spill registers"
        )
    tile_bytes = 2 * TILE_TOKENS * head_dim * 2
    return Form(
        num_rows=num_rows,
        num_computing=1,
        tile_tokens=TILE_TOKENS,
        num_slots=max(2, RING_BYTES // tile_bytes),
        product=products[num_rows],
        has_full_tiles=False,
    )
