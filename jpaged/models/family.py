"""What a model family says of itself: how its config.json is read, what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jpaged.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.weights import LeafSource, TensorNames, leaf_sources


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        architecture: Its name in config.json.
        model_type: What goes with it there.
        read: From config.json to the fields of `ModelConfig` that are not those of every family.
        keys: Keys of config.json that `read` understands.
        defaults: What transformers takes where config.json has no such key.
        names: Of its tensors.
        interleaved: Whether rotary pairs are neighbours in the checkpoint.
    """

    architecture: str
    model_type: str
    read: Callable[[ConfigReader], dict[str, Any]]
    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: TensorNames = TensorNames()
    interleaved: bool = False

    def leaf_sources(self, config: ModelConfig) -> dict[str, LeafSource]:
        """Where each leaf of the module comes from in a checkpoint, by its path."""
        return leaf_sources(config, self.names, interleaved=self.interleaved)
