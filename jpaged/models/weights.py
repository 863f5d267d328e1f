"""Where each leaf of a module comes from in a Hugging Face checkpoint, and back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jpaged.config import ModelConfig


class LeafSource(NamedTuple):
    """How one leaf is put together from a checkpoint's tensors, and taken apart again.

    Attributes:
        tensors: Hugging Face names of the tensors, and their shapes.
        build: Makes the leaf from those tensors, in this order.
        split: Gives them back.
    """

    tensors: dict[str, tuple[int, ...]]
    build: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]


class TensorNames(NamedTuple):
    """What a family calls the tensors of a layer; the defaults are Llama's.

    Attributes:
        attention_in_norm, attention_out_norm, mlp_in_norm, mlp_out_norm: Where they are there.
        q_norm, k_norm: Likewise.
        qkv: Three tensors, or one that holds the rows of all.
        gate_up: Two tensors, or one.
    """

    attention_in_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_in_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


def leaf_sources(
    config: ModelConfig, names: TensorNames, *, interleaved: bool = False
) -> dict[str, LeafSource]:
    """The source of each leaf, by the leaf's path, joined with dots.

    Args:
        config: The model.
        names: What its family calls them.
        interleaved: Rotary pairs are neighbours in the checkpoint, and not half a head apart.
    """
    width, mlp_width = config.hidden_size, config.intermediate_size
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads
    q_rows, kv_rows = config.num_heads * head_dim, kv_heads * head_dim
    rotary_dim = config.rope.rotary_dim or head_dim

    def fuse_qkv(*tensors: np.ndarray) -> np.ndarray:
        if len(tensors) == 1:
            tensors = tuple(np.split(tensors[0], [q_rows, q_rows + kv_rows]))
        rest = tensors[0].shape[1:]
        q, k, v = (w.reshape(kv_heads, -1, head_dim, *rest) for w in tensors)
        if interleaved:
            q, k = _part_pairs(q, rotary_dim), _part_pairs(k, rotary_dim)
        return np.concatenate([q, k, v], axis=1)

    def part_qkv(leaf: np.ndarray) -> Sequence[np.ndarray]:
        q, k, v = np.split(leaf, [group, group + 1], axis=1)
        if interleaved:
            q, k = _join_pairs(q, rotary_dim), _join_pairs(k, rotary_dim)
        parts = [w.reshape(-1, *leaf.shape[3:]) for w in (q, k, v)]
        return parts if len(names.qkv) == 3 else [np.concatenate(parts)]

    def fuse_gate_up(*tensors: np.ndarray) -> np.ndarray:
        return np.stack(np.split(tensors[0], 2) if len(tensors) == 1 else tensors)

    def part_gate_up(leaf: np.ndarray) -> Sequence[np.ndarray]:
        return list(leaf) if len(names.gate_up) == 2 else [leaf.reshape(-1, *leaf.shape[2:])]

    sources: dict[str, LeafSource] = {}

    def add(leaf: str, tensor: str, *shape: int) -> None:
        sources[leaf] = LeafSource({tensor: shape}, _same, lambda leaf: [leaf])

    add("embed.weight", "model.embed_tokens.weight", config.vocab_size, width)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for name, is_there in (
            ("attention_in_norm", config.norm_before), ("attention_out_norm", config.norm_after),
            ("mlp_in_norm", config.norm_before), ("mlp_out_norm", config.norm_after),
        ):  # fmt: skip
            if is_there:
                add(f"{ours}.{name}.weight", f"{theirs}.{getattr(names, name)}.weight", width)
        if config.qk_norm is not None:
            is_row = config.qk_norm == "row"
            for name, rows in (("q_norm", q_rows), ("k_norm", kv_rows)):
                size = rows if is_row else head_dim
                tensor = f"{theirs}.{getattr(names, name)}.weight"
                add(f"{ours}.attention.{name}.weight", tensor, size)
        rows = (q_rows, kv_rows, kv_rows)
        rows = rows if len(names.qkv) == 3 else (sum(rows),)
        mlp_rows = (mlp_width,) * 2 if len(names.gate_up) == 2 else (2 * mlp_width,)
        for kind, shape, has_qkv, has_o, has_mlp in (
            ("weight", (width,), True, True, True),
            ("bias", (), config.qkv_bias, config.o_bias, config.mlp_bias),
        ):
            if has_qkv:
                tensors = {
                    f"{theirs}.{name}.{kind}": (count, *shape)
                    for name, count in zip(names.qkv, rows, strict=True)
                }
                leaf = f"{ours}.attention.qkv_proj.{kind}"
                sources[leaf] = LeafSource(tensors, fuse_qkv, part_qkv)
            if has_o:
                columns = (q_rows,) if shape else ()
                leaf = f"{ours}.attention.o_proj.{kind}"
                add(leaf, f"{theirs}.{names.o}.{kind}", width, *columns)
            if has_mlp:
                tensors = {
                    f"{theirs}.{name}.{kind}": (count, *shape)
                    for name, count in zip(names.gate_up, mlp_rows, strict=True)
                }
                leaf = f"{ours}.mlp.gate_up_proj.{kind}"
                sources[leaf] = LeafSource(tensors, fuse_gate_up, part_gate_up)
                columns = (mlp_width,) if shape else ()
                add(
                    f"{ours}.mlp.down_proj.{kind}", f"{theirs}.{names.down}.{kind}", width, *columns
                )
    add("norm.weight", "model.norm.weight", width)
    if not config.tie_word_embeddings:
        add("lm_head.weight", "lm_head.weight", config.vocab_size, width)
    return sources


def _same(w: np.ndarray) -> np.ndarray:
    return w


def _part_pairs(w: np.ndarray, size: int) -> np.ndarray:
    """Rows `[K, G, H, ...]` of heads: of the first `size` of each, the even ones first."""
    return np.concatenate([w[:, :, :size:2], w[:, :, 1:size:2], w[:, :, size:]], axis=2)


def _join_pairs(w: np.ndarray, size: int) -> np.ndarray:
    """Undoes `_part_pairs`."""
    joined = w.copy()
    joined[:, :, :size:2], joined[:, :, 1:size:2] = np.split(w[:, :, :size], 2, axis=2)
    return joined
