"""Flags of `jpaged serve`."""

import pytest

from server.options import Options, jax_environment, read_options
from server.other_flags import GONE_FLAGS, REFUSED_FLAGS


def read(*arguments: str, **environment: str) -> Options:
    return read_options(arguments, environment)


def test_without_flags_it_serves_the_demo_model_as_vllm_would():
    options = read()
    (model,) = options.models
    assert (model.path, model.names, model.memory_share) == ("smollm2", ["smollm2"], 1.0)
    assert (options.host, options.port) == ("0.0.0.0", 8000)
    assert options.engine.block_size == 16 and options.engine.enable_prefix_caching
    assert options.http.api_keys == [] and options.http.allowed_origins == []
    assert options.args.shutdown_timeout == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("a=X", "b=Y"),
        ("--model", "X", "--served-model-name", "a", "--model", "Y", "--served-model-name", "b"),
    ],
)
def test_several_models_by_name(arguments):
    options = read(*arguments)
    assert [(model.names, model.path) for model in options.models] == [(["a"], "X"), (["b"], "Y")]
    assert [model.memory_share for model in options.models] == [0.5, 0.5]


def test_aliases_and_shares():
    options = read("X", "--served-model-name", "a", "b")
    assert options.models[0].names == ["a", "b"]
    options = read("a=X", "b=Y", "c=Z", "--kv-cache-share", "b=0.6")
    assert [model.memory_share for model in options.models] == pytest.approx([0.2, 0.6, 0.2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=X", "a=Y"], "two models are called 'a'"),
        (["X", "--model", "Y"], "both as arguments and by --model"),
        (["X", "Y", "--served-model-name", "a"], "names one model, and there are several"),
        (["a=X", "b=Y", "--kv-cache-share", "c=0.5"], "--kv-cache-share is 'c=0.5'"),
        (["a=X", "b=Y", "--kv-cache-share", "a=1.0"], "adds up to 1"),
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2.0"),
        (["--dtype", "int4"], "--dtype is 'int4'"),
        (["--num-gpu-blocks-override", "0"], "--num-gpu-blocks-override is 0"),
        (["--ssl-keyfile", "x"], "belong together"),
        (["--trust-remote-code"], "--trust-remote-code is not offered: code that comes with"),
        (["--quantization", "awq"], "--quantization awq is not offered"),
        (["-tp", "2"], "--tensor-parallel-size 2 is not offered"),
        (["--config", "/nonexistent.yaml"], "--config is '/nonexistent.yaml'"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1.0; it must be at least 0"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError) as raised:
        read(*arguments)
    assert message in str(raised.value)


def test_flags_that_are_gone_are_taken_with_a_word(capsys):
    arguments = []
    for flag, (count, _) in GONE_FLAGS.items():
        arguments += [flag, *["1"] * count]
    assert read("X", *arguments).models[0].path == "X"
    said = capsys.readouterr().err
    assert all(f"warning: {flag} does nothing here: " in said for flag in GONE_FLAGS)


def test_flags_that_ask_for_nothing_are_taken():
    arguments = []
    for flag, (allowed, _) in REFUSED_FLAGS.items():
        if allowed:
            arguments += [flag, allowed[0]]
    options = read("X", *arguments, "-tp=1")
    assert options.models[0].path == "X"


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8000), ("8K", 8192), ("4096", 4096), ("auto", None), ("-1", None)]
)
def test_sizes(text, value):
    assert read("--max-model-len", text).engine.max_model_len == value


def test_a_configuration_file_stands_behind_the_command_line(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: X\nserved-model-name: [a, b]\nmax_num_seqs: 4\nport: 1234\n"
        "enable-prefix-caching: false\nenable-log-requests: true\n"
    )
    options = read("--config", str(path), "--port", "4321")
    assert options.models[0].names == ["a", "b"] and options.models[0].path == "X"
    assert (options.engine.max_num_seqs, options.port) == (4, 4321)
    assert not options.engine.enable_prefix_caching and options.http.logs_requests
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold flags"):
        read(f"--config={path}")


def test_keys_come_from_flags_and_environment():
    options = read(VLLM_API_KEY="c", JPAGED_API_KEY="d")
    assert options.http.api_keys == ["d", "c"]
    options = read("--api-key", "a", "b", VLLM_API_KEY="c", JPAGED_API_KEY="d")
    assert options.http.api_keys == ["a", "b"]


def test_the_command_line_counts_against_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: X\nserved-model-name: old\napi-key: [a, b]\nkv-cache-share: [old=1.0]\n"
        "override-generation-config:\n  temperature: 0.5\n"
        'allowed-origins: ["http://localhost:3000"]\nport: 1\n'
    )
    options = read("--config", str(path))
    assert options.models[0].names == ["old"] and options.http.api_keys == ["a", "b"]
    assert options.args.override_generation_config == '{"temperature": 0.5}'
    assert options.http.allowed_origins == ["http://localhost:3000"]
    path.write_text("api-key: k1\n")
    options = read("m", "--config", str(path))
    assert (options.models[0].path, options.http.api_keys) == ("m", ["k1"])
    path.write_text("model: X\nserved-model-name: old\napi-key: [a, b]\nport: 1\n")
    for arguments, names, path_ in (
        (("Y", "--kv-cache-share", "Y=1"), ["Y"], "Y"),
        (("--model", "Y", "--kv-cache-share", "Y=1"), ["Y"], "Y"),
        (("--served-model-name", "new", "--kv-cache-share", "new=1"), ["new"], "X"),
    ):
        options = read("--config", str(path), *arguments, "--api-key", "c")
        assert (options.models[0].names, options.models[0].path) == (names, path_)
        assert len(options.models) == 1 and options.http.api_keys == ["c"]


@pytest.mark.parametrize("arguments", [("-O3",), ("--cudagraph-capture-sizes", "1", "2")])
def test_flags_that_mean_nothing_take_their_arguments_along(arguments, capsys):
    assert read("X", *arguments, "--port", "1").port == 1
    assert "does nothing here" in capsys.readouterr().err


def test_the_device_is_the_engine_process_s_business():
    assert jax_environment(read("--device", "cpu").args)["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in jax_environment(read().args)


def test_unknown_flags_are_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        read("--no-such-flag")
    assert raised.value.code == 2 and "--no-such-flag" in capsys.readouterr().err
