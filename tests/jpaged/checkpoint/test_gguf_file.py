"""One tiny GGUF file: what is read from it, and which damages and additions are refused."""

import os

import gguf
import numpy as np
import pytest

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.gguf_file import dequantize
from jpaged.checkpoint.tensor_file import Extent, TensorFile
from tests import tiny_models
from tests.jpaged.checkpoint.tiny_gguf import Q, permute, write_gguf


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_other_formats_come_as_the_gguf_package_dequantises_them(kind, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    checkpoint = open_checkpoint(path)
    written = tiny_models.tiny_weights("padded-vocab")
    for name, heads in (("mlp.up_proj", None), ("self_attn.k_proj", 2)):
        name = f"model.layers.1.{name}.weight"
        tensor = written[name] if heads is None else permute(written[name], heads)
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(
            read if heads is None else permute(read, heads), expected.astype(np.float32)
        )


def half(data: np.ndarray) -> float:
    return float(data.view(np.float16)[0])


def dequantize_by_definition(block: np.ndarray, kind: Q) -> list[float]:
    """One block, number by number, after dequantize_row_* of llama.cpp's ggml-quants.c."""
    values = []
    match kind:
        case Q.Q5_0:
            scale, high = half(block[:2]), int(block[2:6].view(np.uint32)[0])
            for index in range(32):
                low = int(block[6 + index % 16]) >> (0 if index < 16 else 4) & 15
                values.append(scale * ((low | (high >> index & 1) << 4) - 16))
        case Q.Q4_K:
            scale, minimum, packed = half(block[:2]), half(block[2:4]), block[4:16].astype(int)
            for index in range(256):
                part = index // 32
                if part < 4:
                    s, m = packed[part] & 63, packed[part + 4] & 63
                else:
                    s = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
                    m = packed[part + 4] >> 4 | packed[part] >> 6 << 4
                byte = int(block[16 + index // 64 * 32 + index % 32])
                values.append(scale * s * (byte >> (4 * (part % 2)) & 15) - minimum * m)
        case Q.Q6_K:
            scales, scale = block[192:208].view(np.int8), half(block[208:210])
            for index in range(256):
                side, rest = divmod(index, 128)
                quarter, place = divmod(rest, 32)
                low = (
                    int(block[64 * side + 32 * (quarter % 2) + place]) >> (4 * (quarter // 2)) & 15
                )
                high = int(block[128 + 32 * side + place]) >> (2 * quarter) & 3
                values.append(scale * scales[index // 16] * ((low | high << 4) - 32))
    return values


@pytest.mark.parametrize("kind", [Q.Q5_0, Q.Q4_K, Q.Q6_K])
def test_blocks_are_dequantised_as_they_are_defined(kind):
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (64 * 256 // num_numbers, num_bytes), np.uint8)
    for start in {Q.Q5_0: (0,), Q.Q4_K: (0, 2), Q.Q6_K: (208,)}[kind]:
        scales = random.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    expected = [dequantize_by_definition(block, kind) for block in blocks]
    found = dequantize(blocks.reshape(-1), kind, (64, 256))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.reshape(expected, (64, 256)), rtol=1e-5, atol=1e-6)


def test_metadata_are_read_as_the_gguf_package_reads_them(tmp_path):
    extra = {"general.x": 1.5, "general.y": True, "general.z": "é" * 10}
    path = write_gguf(tmp_path / "tiny.gguf", extra=extra)
    reader = gguf.GGUFReader(path)
    expected = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert open_checkpoint(path)._metadata == expected


def test_header_longer_than_one_piece_is_read(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", extra={"general.long": "x" * (40 << 20)})
    assert open_checkpoint(path).shapes


def test_end_of_turn_ends_an_answer_too(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": tiny_models.IM_END_TOKEN_ID}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", extra=extra))
    expected = (tiny_models.EOS_TOKEN_ID, tiny_models.IM_END_TOKEN_ID)
    assert checkpoint.model_config.eos_token_ids == expected


def test_end_of_turn_that_only_the_template_names_ends_an_answer_too(tmp_path):
    # llama.cpp's converter writes no such id for most models that chat.
    both = (tiny_models.EOS_TOKEN_ID, tiny_models.IM_END_TOKEN_ID)
    for template, expected in (
        (tiny_models.CHAT_TEMPLATE, both),
        ("x", both[:1]),
        (None, both[:1]),
    ):
        replaced = {"tokenizer.chat_template": template}
        with open_checkpoint(write_gguf(tmp_path / "tiny.gguf", replaced=replaced)) as checkpoint:
            assert checkpoint.model_config.eos_token_ids == expected


def test_tokenizer_and_template_are_rebuilt(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", pre="smollm")
    tokenizer = open_checkpoint(file).tokenizer()
    text = "x hey 12 日本<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.token_to_id("Ġhe") in tokenizer.encode(text)
    assert tokenizer.special_token_ids == set(range(256, 260))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("pre", "add_bos", "has_bos"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
     ("llama-bpe", False, False)],
)  # fmt: skip
def test_bos_is_added_as_the_file_says_or_its_family_does(pre, add_bos, has_bos, tmp_path):
    extra = {} if add_bos is None else {"tokenizer.ggml.add_bos_token": add_bos}
    file = write_gguf(tmp_path / "tiny.gguf", pre=pre, extra=extra)
    ids = open_checkpoint(file).tokenizer().encode("x")
    assert ids == ([tiny_models.BOS_TOKEN_ID] if has_bos else []) + [ord("x")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "phi3"}, "general.architecture is 'phi3'"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
        ({"extra": {"llama.attention.causal": False}}, "llama.attention.causal is False"),
        ({"extra": {"llama.attention.sliding_window": 9}}, "llama.attention.sliding_window is 9"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type is 'longrope'"),
        ({"extra": {"llama.rope.scaling.attn_factor": 2.0}}, "rope.scaling.attn_factor is 2.0"),
        ({"extra": {"llama.rope.scaling.yarn_log_multiplier": 0.1}}, "yarn_log_multiplier is 0.1"),
        ({"extra": {"llama.logit_scale": 0.5}}, "llama.logit_scale is 0.5"),
        ({"extra": {"llama.attention.value_length": 8}}, "llama.attention.value_length is 8"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(7, np.float32)}}, "must hold 8 numbers"),
        ({"extra_tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "must hold 8 numbers"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float16)}}, "has format F16"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)},
          "extra": {"llama.rope.scaling.factor": 2.0}}, "without other rope scaling"),
        ({"extra_tensors": {"model.norm.weight": np.ones(64, np.float32)}},
         "'model.norm.weight' is there twice"),
        ({"extra_tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
         "blk.0.attn_q_norm.weight"),
        ({"extra": {"split.count": 2}}, "split.count is 2"),
        ({"skip": "model.embed_tokens.weight"}, "token_embd.weight' is missing"),
        ({"skip": "model.norm.weight"}, "model.norm.weight.* is missing"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes, named, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ValueError, match=f"tiny.gguf.*{named}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
     ({"tokenizer_model": "bert"}, "tokenizer.ggml.model is 'bert'"),
     ({"tokenizer_model": "llama"}, "tokenizer.ggml.scores is None"),
     ({"extra": {"tokenizer.ggml.odd": 1}}, "tokenizer.ggml.odd is 1"),
     ({"extra": {"tokenizer.ggml.remove_extra_whitespaces": True}},
      "remove_extra_whitespaces is True")],
)  # fmt: skip
def test_unknown_tokenizer_is_refused_by_name(changes, named, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ValueError, match=named):
        open_checkpoint(path).tokenizer()


@pytest.mark.parametrize("num_bytes", [0, 2, 6, 30, 500, -1, -5000])
def test_truncated_file_is_refused(num_bytes, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"tiny\.gguf (is truncated|does not begin)"):
        open_checkpoint(path)


def test_other_file_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="is not a GGUF file"):
        open_checkpoint(path)


def test_other_version_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 9
    path.write_bytes(data)
    with pytest.raises(ValueError, match="GGUF version 9"):
        open_checkpoint(path)


def string(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def number(value: int, num_bytes: int = 4) -> bytes:
    return value.to_bytes(num_bytes, "little")


def record(
    name: str = "a", *, dims: tuple[int, ...] = (2,), kind: int = Q.F32, offset: int = 0
) -> bytes:
    shape = number(len(dims)) + b"".join(number(dim, 8) for dim in dims)
    return string(name) + shape + number(kind) + number(offset, 8)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + number(kind) + value


UINT32, STRING, ARRAY = 4, 8, 9


@pytest.mark.parametrize(
    ("pairs", "records", "problem"),
    [
        ([string("k")[:-1] + b"\xff"], [], "can't decode byte 0xff"),
        ([pair("k", 99, b"")], [], "type 99"),
        ([pair("k", ARRAY, (number(ARRAY) + number(1, 8)) * 50_000)], [], "elements of type 9"),
        ([pair("k", ARRAY, number(99) + number(1, 8))], [], "elements of type 99"),
        ([pair("k", UINT32, number(1))] * 2, [], "k is there twice"),
        ([pair("general.alignment", UINT32, number(0))], [], "general.alignment is 0"),
        ([pair("general.alignment", STRING, string("x"))], [], "general.alignment is 'x'"),
        ([], [record(dims=())], "tensor 'a' has 0 dimensions"),
        ([], [string("a") + number(2**32 - 1)], "tensor 'a' has 4294967295 dimensions"),
        ([], [record(kind=999)], "tensor 'a' has format 999"),
        ([], [record(dims=(33,), kind=Q.Q8_0)], "rows of 33 elements, and Q8_0 has blocks of 32"),
        ([], [record(dims=(2**63, 2**63))], "tensor 'a' ends at byte"),
        ([], [record(offset=2**64 - 32)], "tensor 'a' begins at byte"),
        ([], [record(), record("b")], "tensor 'b' begins at byte"),
        ([], [record(), record(offset=32)], "tensor 'a' is there twice"),
    ],
)  # fmt: skip
def test_header_that_makes_no_sense_is_refused(pairs, records, problem, tmp_path):
    path = tmp_path / "odd.gguf"
    counts = number(len(records), 8) + number(len(pairs), 8)
    path.write_bytes(b"GGUF" + number(3) + counts + b"".join(pairs + records) + bytes(256))
    with pytest.raises(ValueError, match=rf"odd\.gguf.*{problem}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    [
        number(0, 8) + number(2**64 - 1, 8),
        number(2**64 - 1, 8) + number(0, 8),
        number(0, 8) + number(1, 8) + number(2**64 - 1, 8),
        number(0, 8) + number(1, 8) + pair("k", ARRAY, number(STRING) + number(2**60, 8)),
        number(0, 8) + number(1, 8) + pair("k", ARRAY, number(UINT32) + number(2**64 - 1, 8)),
    ],
    ids=["pairs", "tensors", "key", "strings", "numbers"],
)
@pytest.mark.parametrize("file_bytes", [200, 2**40], ids=["small", "large"])
def test_counts_beyond_reason_do_not_fill_the_memory(header, file_bytes, tmp_path, monkeypatch):
    path = tmp_path / "odd.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF" + number(3) + header)
        file.truncate(file_bytes)  # sparse: takes no room
    asked = []
    read = TensorFile.read

    def count(file: TensorFile, extent: Extent) -> np.ndarray:
        asked.append(extent.num_bytes)
        return read(file, extent)

    monkeypatch.setattr(TensorFile, "read", count)
    with pytest.raises(ValueError, match=r"odd\.gguf is (damaged|truncated)"):
        open_checkpoint(path)
    assert max(asked) <= 64 << 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", "2"), ("llama.block_count", 0), ("llama.block_count", 2**31 - 1),
        ("llama.attention.head_count", 0), ("llama.attention.head_count", 1.5),
        ("llama.attention.head_count_kv", "x"), ("llama.embedding_length", True),
        ("llama.rope.dimension_count", "x"), ("llama.attention.layer_norm_rms_epsilon", "x"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")), ("llama.rope.freq_base", "x"),
        ("split.count", "x"), ("tokenizer.ggml.eos_token_id", "x"),
        ("tokenizer.ggml.eot_token_id", "x"),
    ],
)  # fmt: skip
def test_metadata_of_the_wrong_type_are_refused(key, value, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", replaced={key: value})
    with pytest.raises(ValueError, match=r"tiny\.gguf: "):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.tokens", "x"), ("tokenizer.ggml.token_type", 5),
        ("tokenizer.ggml.token_type", [1, 2]), ("tokenizer.ggml.merges", "x"),
        ("tokenizer.ggml.merges", ["x"]), ("tokenizer.ggml.pre", 5),
        ("tokenizer.ggml.bos_token_id", 10**6), ("tokenizer.ggml.padding_token_id", "x"),
        ("tokenizer.chat_template", 5), ("tokenizer.chat_templates", "x"),
        ("tokenizer.chat_templates", ["missing"]),
    ],
)  # fmt: skip
def test_tokenizer_of_the_wrong_type_is_refused(key, value, tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", replaced={key: value}))
    with pytest.raises(ValueError, match=r"tiny\.gguf: "):
        checkpoint.tokenizer()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.chmod(0)
    with pytest.raises(PermissionError, match=r"tiny\.gguf"):
        open_checkpoint(path)


def test_smollm2_is_read_as_the_gguf_package_dequantises_it():
    with open_checkpoint("smollm2") as checkpoint:
        config = checkpoint.model_config
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
        assert (config.vocab_size, config.hidden_size, config.head_dim) == (49152, 576, 64)
        assert (config.rope.theta, config.rms_norm_eps) == (100000.0, 1e-5)
        assert config.tie_word_embeddings and config.eos_token_ids == (2,)
        embedding = checkpoint.read("model.embed_tokens.weight")
        # Q8_0: a row is 18 blocks, each a float16 scale and 32 signed bytes.
        raw = checkpoint._file.read(checkpoint._tensors["model.embed_tokens.weight"].extent)
        blocks = raw.reshape(49152, 18, 34)
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        values = blocks[..., 2:].view(np.int8) * scales
        np.testing.assert_array_equal(embedding, values.reshape(49152, 576))
