"""Converts a checkpoint: Hugging Face or GGUF to Orbax, Orbax to safetensors.

The same as `jpaged convert`, whose --help says more.

Usage: python scripts/convert_hf.py SOURCE TARGET [--to FORMAT] [--dtype DTYPE] [--revision NAME]
"""

import sys

from jpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
