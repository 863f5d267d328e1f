"""KV groups: layers that share block tables.

A layer with a window needs only the blocks that its window reaches; one without needs all. So
layers of one kind form groups of their own, each with its own block table per request, and blocks
behind a window are given back. All groups draw from one pool: they have the same number of layers,
`size` (the last group of a kind may have fewer), so that a block, which holds its tokens' keys and
values for `size` layers, fits any of them. Layer `i` of every group lives in array `i` of the
cache. The idea is that of vLLM's hybrid KV cache manager; docs/decisions/022.
"""

from functools import cache
from typing import NamedTuple

MAX_GROUPS = 8
"""Each costs a block table per request, filled and sent in every step."""


class KVGroup(NamedTuple):
    """Layers that share block tables.

    Attributes:
        window: Tokens that they see at most, themselves included: what lies behind is given back.
            `None`: nothing is.
        layers: Their indices.
    """

    window: int | None
    layers: tuple[int, ...]


@cache
def group_layers(windows: tuple[int | None, ...]) -> tuple[KVGroup, ...]:
    """Parts a model's layers into groups.

    Small groups waste little where a kind's layers are not a multiple of them, large ones need few
    tables. The size is chosen by the sum of what a short request takes (all groups) and what a long
    one takes (groups without a window), each over the least possible.

    Args:
        windows: Of each layer; `None`: it sees all.
    """
    num_layers = len(windows)
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    num_full = len(kinds.get(None, ()))

    def part(size: int) -> tuple[KVGroup, ...]:
        return tuple(
            KVGroup(window, tuple(layers[start : start + size]))
            for window, layers in kinds.items()
            for start in range(0, len(layers), size)
        )

    def cost(groups: tuple[KVGroup, ...]) -> tuple[float, int]:
        size = max(len(group.layers) for group in groups)
        short = len(groups) * size / num_layers
        long = sum(group.window is None for group in groups) * size / max(num_full, 1)
        return short + long, len(groups)

    known = [window for window in kinds if window is not None]
    together = KVGroup(None if num_full else max(known), tuple(range(num_layers)))
    candidates = [part(size) for size in range(1, num_layers + 1)]
    return min(
        [(together,), *(groups for groups in candidates if len(groups) <= MAX_GROUPS)], key=cost
    )
