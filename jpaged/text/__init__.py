"""Between text and token ids: the tokenizer, the chat template, decoding a few ids at a time."""
