"""Asks Linux to back large arrays on CPU with huge pages.

Block gathers touch memory in pieces of a few KiB in no order, and a step reads every weight once:
with 4 KiB pages both spend much of their time on address translation. Where the system allows
huge pages on request (the usual setting, `madvise`), a decode step's gathers take 0.6 of the time
(docs/decisions/008).
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable

import jax

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1 and newer; not in the mmap module


def use_huge_pages(arrays: Iterable[jax.Array], *, are_written: bool) -> None:
    """Puts the memory of CPU arrays on huge pages, as far as the system will.

    A hint: where it is not understood or not allowed, nothing changes.

    Args:
        arrays: Arrays on any device; only those on CPU are looked at.
        are_written: Whether they have their memory already, which is then moved. Other memory
            comes in huge pages as it is first written.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for array in arrays:
        if next(iter(array.devices())).platform != "cpu":
            return
        start = array.unsafe_buffer_pointer()
        first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        size = (start + array.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - first
        if size <= 0:
            continue
        address, length = ctypes.c_void_p(first), ctypes.c_size_t(size)
        libc.madvise(address, length, mmap.MADV_HUGEPAGE)
        if are_written:
            libc.madvise(address, length, _MADV_COLLAPSE)
