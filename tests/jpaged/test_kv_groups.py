import pytest

from jpaged.kv_groups import MAX_GROUPS, group_layers


def gemma3(num_layers: int) -> list[int | None]:
    return [None if layer % 6 == 5 else 512 for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "num_windowed", "num_full", "size"),
    [
        ([None] * 32, 0, 1, 32),
        ([4096] * 32, 1, 0, 32),
        ([4096, None] * 13, 1, 1, 13),  # Gemma 2 2B
        (gemma3(18), 5, 1, 3),  # Gemma 3 270M
        (gemma3(26), 6, 1, 4),  # Gemma 3 1B, whose sixth group has two layers
        (gemma3(48), 5, 1, 8),  # Gemma 3 12B
        (gemma3(62), 6, 1, 10),  # Gemma 3 27B
    ],
)
def test_layers_of_one_kind_share_groups_of_one_size(windows, num_windowed, num_full, size):
    groups = group_layers(tuple(windows))
    assert sum(group.window is not None for group in groups) == num_windowed
    assert sum(group.window is None for group in groups) == num_full
    assert max(len(group.layers) for group in groups) == size
    assert sorted(layer for group in groups for layer in group.layers) == [*range(len(windows))]
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def test_a_kind_too_rare_for_groups_of_its_own_frees_nothing():
    [group] = group_layers((*[None] * 31, 64))
    assert group == (None, tuple(range(32)))
    [group] = group_layers((8, *[512] * 40))
    assert group == (512, tuple(range(41)))


@pytest.mark.parametrize("num_full", range(1, 40, 3))
def test_tables_are_bounded(num_full):
    assert len(group_layers((*[None] * num_full, *[64] * 40))) <= MAX_GROUPS
