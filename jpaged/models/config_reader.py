"""Reads values of a config.json, and says which key is wrong."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.config import ROPE_TYPES, RopeConfig

# Sizes and ids are int32 on the device.
_MAX_INT = 2**31 - 1
# Far more than any model has. Lists and tables are made by these numbers before a tensor is looked
# at, so that a damaged one would fill the memory.
_MAX_COUNTS = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 26,
}

# Of any number that is no count: float32 holds its square and its inverse.
_LEAST, _MOST = 1e-18, 1e18

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip


class ConfigReader:
    """A config.json; a key whose value is null counts as absent."""

    def __init__(self, config: Mapping[str, Any]):
        """Takes the content, with what its family takes for absent keys."""
        self._config = config

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is."""
        value = self._config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"config.json: {key} is missing; a model of this kind needs it")
        most = _MAX_COUNTS.get(key, _MAX_INT)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(
                f"config.json: {key} is {value!r}; it must be a whole number from 1 to {most}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return as_number(self.get(key, default), f"config.json: {key}")

    def number_or_none(self, key: str) -> float | None:
        """The same, or `None` where the key is absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} is {value!r}; it must be true or false")
        return value

    def windows(self, window: int | None, default: Sequence[bool]) -> tuple[int | None, ...]:
        """The window of each layer, by `layer_types`.

        Args:
            window: Of the layers that have one; `None`: the model has none.
            default: Which these are, where there is no `layer_types`.
        """
        kinds = self.get("layer_types")
        if kinds is None:
            has_window = list(default)
        elif not isinstance(kinds, list) or len(kinds) != len(default):
            raise ValueError(
                f"config.json: layer_types is {kinds!r}; it must be a list of {len(default)}"
            )
        else:
            for kind in kinds:
                if kind not in ("full_attention", "sliding_attention"):
                    raise ValueError(
                        f"config.json: layer_types holds {kind!r}; jpaged supports "
                        "'full_attention' and 'sliding_attention'"
                    )
            has_window = [kind == "sliding_attention" for kind in kinds]
        if any(has_window) and window is None:
            if kinds is not None:
                raise ValueError(
                    "config.json: layer_types holds 'sliding_attention', and sliding_window is "
                    "null; give it a size"
                )
            return ()
        return tuple(window if has else None for has in has_window) if any(has_window) else ()

    def rope(self, *, head_dim: int, partial: bool = False, family_type: str = "") -> RopeConfig:
        """Rotary embeddings, in either spelling and with the defaults of transformers 5.

        Args:
            head_dim: Width of a head.
            partial: Whether a part of a head may be rotated.
            family_type: What the family means by "su" and "yarn", if not what they are.
        """
        owner = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        values = self.get(owner, {})
        if not isinstance(values, dict):
            raise ValueError(f"config.json: {owner} is {values!r}; it must be an object")
        values = {
            "rope_theta": self.get("rope_theta", 10000.0),
            "partial_rotary_factor": self.get("partial_rotary_factor", 1.0),
        } | {key: value for key, value in values.items() if value is not None}
        return self.read_rope(
            owner, values, head_dim=head_dim, partial=partial, family_type=family_type
        )

    def read_rope(
        self,
        owner: str,
        values: Mapping[str, Any],
        *,
        head_dim: int,
        partial: bool = False,
        family_type: str = "",
    ) -> RopeConfig:
        """Rotary embeddings from an object of parameters.

        Args:
            owner: The key that holds them, for messages.
            values: The parameters, theta included.
            head_dim: Width of a head.
            partial: As in `rope`.
            family_type: Likewise.
        """
        rest = dict(values)
        theta = as_number(rest.pop("rope_theta"), "config.json: rope_theta")
        share = as_number(
            rest.pop("partial_rotary_factor", 1.0), "config.json: partial_rotary_factor"
        )
        if share > 1:
            raise ValueError(
                f"config.json: partial_rotary_factor is {share}; it must be at most 1: a share of "
                "a head"
            )
        rotary_dim = int(head_dim * share)
        if not partial and share != 1.0:
            raise ValueError(
                f"config.json: partial_rotary_factor is {share!r}; models of this kind rotate "
                "whole heads"
            )
        if share > 1 or rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"config.json: partial_rotary_factor is {share!r}; of {head_dim} dimensions it "
                "must leave an even number, two or more"
            )
        found = rest.pop("rope_type", rest.get("type", "default"))
        rest.pop("type", None)
        kind = family_type if family_type and found in ("su", "yarn") else found
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"config.json: {owner} has rope_type {kind!r}; supported: "
                + ", ".join(map(repr, ROPE_TYPES))
            )
        fields: dict[str, Any] = {"theta": theta, "rope_type": kind}
        if rotary_dim != head_dim:
            fields["rotary_dim"] = rotary_dim
        if kind == "default":  # whatever else stands there has no effect
            return RopeConfig(**fields)
        longest = self.whole("max_position_embeddings")
        original = rest.pop("original_max_position_embeddings", None)
        original = self.get("original_max_position_embeddings", original) or longest
        for key in rest:
            if key not in _ROPE_KEYS[kind]:
                raise ValueError(
                    f"config.json: {owner}.{key} is {rest[key]!r}; rope_type {kind!r} has no such "
                    "key"
                )

        def number(key: str, default: float | None = None) -> float:
            return as_number(rest.get(key, default), f"config.json: {owner}.{key}")

        if kind == "dynamic":
            fields["original_max_position_embeddings"] = longest
        elif kind != "linear":
            name = f"config.json: {owner}.original_max_position_embeddings"
            original = int(as_number(original, name))
            if original < 2:
                raise ValueError(f"{name} is {original}; it must be a whole number from 2 up")
            fields["original_max_position_embeddings"] = original
        match kind:
            case "linear" | "dynamic":
                fields["factor"] = number("factor")
            case "llama3":
                fields |= {key: number(key) for key in _ROPE_KEYS[kind]}
            case "yarn":
                fields |= _read_yarn(rest, number, longest / original)
            case _:
                fields |= _read_longrope(owner, rest, number, longest, original, rotary_dim)
        return RopeConfig(**fields)


def _read_yarn(rest: Mapping[str, Any], number: Any, ratio: float) -> dict[str, Any]:
    factor = number("factor", ratio)

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rest.get("attention_factor") is not None:
        attention = number("attention_factor")
    elif rest.get("mscale") and rest.get("mscale_all_dim"):
        attention = mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    else:
        attention = mscale()
    return {
        "factor": factor,
        "attention_factor": attention,
        "beta_fast": number("beta_fast", 32.0),
        "beta_slow": number("beta_slow", 1.0),
        "truncate": rest.get("truncate", True) is not False,
    }


def _read_longrope(
    owner: str, rest: Mapping[str, Any], number: Any, longest: int, original: int, rotary_dim: int
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        values = rest.get(key)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise ValueError(
                f"config.json: {owner}.{key} must be a list of {rotary_dim // 2} numbers, one for "
                f"each pair of rotated dimensions"
            )
        fields[key] = tuple(as_number(value, f"config.json: {owner}.{key}") for value in values)
    factor = number("factor", longest / original)
    attention = 1.0
    if rest.get("attention_factor") is not None:
        attention = number("attention_factor")
    elif factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return fields | {"attention_factor": attention}


def as_number(value: Any, owner: str) -> float:
    """A finite number above 0, or `ValueError`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN and infinity, which Python reads in JSON, are in no range.
    if not is_number or not _LEAST <= value <= _MOST:
        raise ValueError(
            f"{owner} is {reprlib.repr(value)}; it must be a finite number above 0, from {_LEAST} "
            f"to {_MOST}"
        )
    return float(value)


def as_ids(value: Any, owner: str) -> tuple[int, ...]:
    """An id, or a list of them, or none, or `ValueError`."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id <= _MAX_INT:
            raise ValueError(
                f"{owner} is {value!r}; it must be an id from 0 to {_MAX_INT} or a list of them"
            )
    return tuple(dict.fromkeys(ids))
