"""What the lines of both processes look like, and which are left out."""

import logging


def set_up_logging(level: int) -> None:
    """Lines as vLLM has them, near enough for eyes and for grep."""
    logging.basicConfig(
        level=level,
        format="%(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # Each says at every start what sounds like a fault and is none, and keys of caches by hundreds.
    for name in ("jax", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, level))
