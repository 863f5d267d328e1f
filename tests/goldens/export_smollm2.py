"""Writes the demo model, as jpaged reads it, as a float32 Hugging Face directory.

The tensors must have the digest that another converter (gguf's own reader and dequantisation,
rows of q and k put back in Hugging Face's order) gave for the same file, so that the goldens are
evidence about jpaged and not its echo.

Usage: export_smollm2.py DIRECTORY
"""

import json
import sys
from pathlib import Path

from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.gguf_file import GGUFFile
from jpaged.checkpoint.gguf_tokenizer import build_tokenizer, read_tokenizer_config
from tests import tiny_models

WEIGHTS_SHA256 = "d790a58ce2d4e41ff3b8a185768b102e08e998ca4f2b282bf1e007f6536c16e0"


def main() -> None:
    """Exports weights, config and tokenizer."""
    directory = Path(sys.argv[1])
    with open_checkpoint("smollm2") as checkpoint:
        assert isinstance(checkpoint, GGUFFile)
        tensors = {name: checkpoint.read(name) for name in checkpoint.shapes}
        digest = tiny_models.weights_sha256(tensors)
        if digest != WEIGHTS_SHA256:
            raise ValueError(f"weights of the demo model have sha256 {digest}, not the known one")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        model = checkpoint.model_config
        config = {
            "architectures": [model.architecture],
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "rms_norm_eps": model.rms_norm_eps,
            "rope_theta": model.rope.theta,
            "tie_word_embeddings": model.tie_word_embeddings,
            "bos_token_id": model.bos_token_id,
            "eos_token_id": list(model.eos_token_ids),
        }
        metadata = checkpoint._metadata  # no other caller needs it
        tokenizer_config = dict(read_tokenizer_config(metadata))
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer_config["chat_template"] = checkpoint.tokenizer().chat_template
        (directory / "config.json").write_text(json.dumps(config))
        build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


if __name__ == "__main__":
    main()
