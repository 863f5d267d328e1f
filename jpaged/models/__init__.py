"""One file per model family; a family says only what differs."""
