"""Which architectures exist, by their name in config.json."""

from jpaged.models.family import Family
from jpaged.models.gemma2 import GEMMA2
from jpaged.models.gemma3 import GEMMA3
from jpaged.models.glm4 import GLM4
from jpaged.models.granite import GRANITE
from jpaged.models.llama import LLAMA
from jpaged.models.mistral import MISTRAL
from jpaged.models.olmo2 import OLMO2
from jpaged.models.phi3 import PHI3
from jpaged.models.qwen2 import QWEN2
from jpaged.models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, GLM4, GRANITE, OLMO2
    )
}  # fmt: skip


def find_family(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ValueError: If there is none; names those that exist.
    """
    if architecture not in FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
