"""Decides what each step computes. Plain Python; never imports JAX.

`scheduler` decides which requests get how many tokens, `kv_cache_manager` keeps the blocks of each
request, `block_pool` knows who owns which block and which content can be found again.
"""
