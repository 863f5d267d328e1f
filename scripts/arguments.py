"""Kinds of command-line arguments that several scripts have."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A file that can be written, which shows before minutes of work and not after."""
    path = Path(text)
    folder = path.resolve().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)
