"""Prefill items through Mosaic GPU: many rows per item, so that products are the work.

Two warpgroups of 64 rows each compute with `wgmma`, a third fetches, so that one's softmax runs
beside the other's products. sm_90 only: later chips have other tensor-core instructions.
"""

from pallas_kernels.paged_attention.mosaic_kernel import Form

TILE_TOKENS = 64


def prefill_form(num_rows: int, head_dim: int) -> Form:
    """The form for items of so many rows: 128, or 64 where a row is too long for two warpgroups.

    Raises:
        ValueError: If `num_rows` is neither.
    """
    if num_rows not in (64, 128):
        raise ValueError(f"tile_rows is {num_rows}; Mosaic takes 64 or 128")
    return Form(
        num_rows=64,
        num_computing=num_rows // 64,
        tile_tokens=TILE_TOKENS,
        num_slots=2 if head_dim > 64 else 4,
        product="wgmma",
        has_full_tiles=True,
    )
