"""Kernels that read a block-table-indexed KV cache; they know JAX only, never jpaged."""
