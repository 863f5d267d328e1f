"""The flags of `jpaged serve`: vLLM's names and defaults wherever jpaged has the thing."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from jpaged.config import ATTENTION_BACKENDS, LOGPROBS_MODES, EngineConfig
from server.app import HttpOptions

DEFAULT_MODEL = "smollm2"


@dataclass
class ModelOptions:
    """One model.

    Attributes:
        names: That requests may use.
        path: What `open_checkpoint` takes.
        memory_share: Of the KV memory.
    """

    names: list[str]
    path: str
    memory_share: float = 1.0


@dataclass
class Options:
    """All that was asked for."""

    models: list[ModelOptions]
    engine: EngineConfig
    http: HttpOptions
    host: str
    port: int
    args: argparse.Namespace = field(repr=False)


# Flags of vLLM, now or once, that there is nothing for here: what they mean now.
GONE_FLAGS: Mapping[str, tuple[int, str]] = {
    # (arguments, what to say)
    "--disable-log-requests": (0, "requests are not logged unless --enable-log-requests asks"),
    "--disable-log-stats": (0, "give --log-stats-interval 0 to have no line every 10 s"),
    "--enforce-eager": (0, "every step is a compiled program; `jpaged warmup` compiles ahead"),
    "--swap-space": (1, "preempted requests are computed again; nothing is swapped to the CPU"),
    "--preemption-mode": (1, "preempted requests are computed again, always"),
    "--use-v2-block-manager": (0, "there is one block manager"),
    "--num-scheduler-steps": (1, "the batch is formed anew at every step"),
    "--guided-decoding-backend": (1, "structured output is not offered yet"),
    "--task": (1, "all models generate"),
    "--max-seq-len-to-capture": (1, "every step is compiled, at any length"),
    "--worker-use-ray": (0, "one process runs the engines"),
    "--max-num-partial-prefills": (1, "prompts are chunked under --max-num-batched-tokens"),
    "--enable-chunked-prefill": (0, "prompts are always chunked"),
    "--no-enable-chunked-prefill": (0, "prompts are always chunked"),
    "--scheduler-reserve-full-isl": (0, "a prompt is admitted only if all of it fits, always"),
    "--async-scheduling": (0, "steps follow each other; not offered yet"),
    "--load-format": (1, "the format is told by the files"),
    "--enable-prompt-tokens-details": (0, "cached tokens are always reported"),
    "--enable-server-load-tracking": (0, "/load always answers"),
    "--enable-request-id-headers": (0, "X-Request-Id is always sent"),
    "--disable-uvicorn-access-log": (0, "there is no access log unless --enable-log-requests asks"),
    "--disable-frontend-multiprocessing": (0, "engines run in a process of their own, always"),
    "--prefix-caching-hash-algo": (1, "prefixes are found by their tokens, not by a hash"),
    "--max-log-len": (1, "prompts are not logged"),
    "--show-hidden-metrics-for-version": (1, "old metric names are always there"),
}
# Flags that ask for what there is not: refused, unless they ask for nothing.
REFUSED_FLAGS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--trust-remote-code": (
        (), "code that comes with a checkpoint is never run; convert the model, or use a family "
        "that jpaged knows"
    ),
    "--quantization": (("none",), "quantised weights are not offered yet"),
    "--kv-cache-dtype": (("auto",), "the cache has the dtype of the model"),
    "--tensor-parallel-size": (("1",), "a model runs on one device"),
    "--pipeline-parallel-size": (("1",), "a model runs on one device"),
    "--data-parallel-size": (("1",), "there is one engine for each model"),
    "--tokenizer": ((), "the tokenizer is the checkpoint's"),
    "--tokenizer-mode": (("auto", "hf"), "tokenizers are those of tokenizer.json"),
    "--skip-tokenizer-init": ((), "the server speaks text"),
    "--speculative-config": ((), "speculative decoding is not offered yet"),
    "--speculative-model": ((), "speculative decoding is not offered yet"),
    "--enable-lora": ((), "LoRA adapters are not offered yet"),
    "--lora-modules": ((), "LoRA adapters are not offered yet"),
    "--enable-auto-tool-choice": ((), "tool calls are not offered yet"),
    "--tool-call-parser": ((), "tool calls are not offered yet"),
    "--reasoning-parser": ((), "reasoning is not parted from the answer yet"),
    "--enable-reasoning": ((), "reasoning is not parted from the answer yet"),
    "--cpu-offload-gb": (("0",), "weights stay on the device"),
    "--enable-sleep-mode": ((), "an engine cannot give up its memory and go on"),
    "--rope-scaling": ((), "rope scaling is the checkpoint's"),
    "--rope-theta": ((), "rope theta is the checkpoint's"),
    "--hf-overrides": ((), "the configuration is the checkpoint's"),
    "--enable-prompt-embeds": ((), "prompts are text or token ids"),
    "--max-num-queued-tokens": ((), "give --max-num-queued-reqs"),
    "--uds": ((), "give --host and --port"),
}  # fmt: skip
_NO_ARGUMENT = frozenset(
    {
        "--trust-remote-code", "--skip-tokenizer-init", "--enable-lora",
        "--enable-auto-tool-choice", "--enable-reasoning", "--enable-sleep-mode",
        "--enable-prompt-embeds",
    }
)  # fmt: skip
_SHORT = {"-q": "--quantization", "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size",
          "-pp": "--pipeline-parallel-size"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that mean something; `read_options` sorts out the others."""
    parser.add_argument(
        "models", nargs="*", metavar="[NAME=]MODEL",
        help="smollm2 (the default), a Hugging Face directory, a hub id, or a .gguf file; several "
        "are served under their names",
    )  # fmt: skip
    model = parser.add_argument_group("models").add_argument
    model("--model", action=_InOrder, metavar="MODEL", help="the same; may be repeated")
    model("--served-model-name", action=_InOrder, nargs="+", metavar="NAME",
          help="names of the model; after each --model, that one's")  # fmt: skip
    model("--revision", help="branch, tag or commit of a hub id")
    model("--hf-token", help="for gated models; HF_TOKEN does as well")
    model("--download-dir", help="where models are fetched to; HF_HOME does as well")
    model("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    model("--generation-config", default="auto", help="auto, the checkpoint's, or vllm, none")
    model("--override-generation-config", metavar="JSON", help="entries that take precedence")
    model("--chat-template", metavar="FILE", help="Jinja file or text, instead of the model's")
    model("--chat-template-content-format", default="auto", choices=("auto", "string", "openai"))
    model("--default-chat-template-kwargs", metavar="JSON", help="variables of the template")
    model("--trust-request-chat-template", action="store_true",
          help="run templates that requests bring")  # fmt: skip

    engine = parser.add_argument_group("engine").add_argument
    engine("--device", default="auto", choices=("auto", "cpu", "cuda", "gpu"))
    engine("--max-model-len", type=_size, metavar="N", help="prompt and answer; 8k, auto or -1")
    engine("--max-num-seqs", type=int, metavar="N", help="requests in one step at most")
    engine("--max-num-batched-tokens", type=_size, metavar="N", help="tokens in one step at most")
    engine("--block-size", type=int, default=16, metavar="N", help="tokens per KV block")
    engine("--gpu-memory-utilization", type=float, default=0.92, metavar="X",
           help="share of memory for weights, workspace and KV cache (default: 0.92)")  # fmt: skip
    engine("--kv-cache-memory-bytes", type=_size, metavar="N", help="KV cache of all models")
    engine("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks of each model")
    engine("--kv-cache-share", action="append", nargs="+", default=[], metavar="NAME=X",
           help="parts of the KV memory by model (default: equal)")  # fmt: skip
    engine("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    engine("--long-prefill-token-threshold", type=int, default=0, metavar="N")
    engine("--watermark", type=float, default=0.01, metavar="X")
    engine("--scheduling-policy", default="fcfs", choices=("fcfs", "priority"))
    engine("--max-num-queued-reqs", type=int, metavar="N", help="waiting requests; more get 503")
    engine("--max-logprobs", type=int, default=20, metavar="N")
    engine("--logprobs-mode", default="raw_logprobs", choices=LOGPROBS_MODES)
    engine("--attention-backend", default="auto", choices=ATTENTION_BACKENDS)
    engine("--seed", type=int, default=0)

    http = parser.add_argument_group("HTTP").add_argument
    http("--host", default="0.0.0.0", help="address to listen at (default: all)")
    http("--port", type=int, default=8000, help="port to listen at (default: 8000)")
    http(
        "--api-key", action="append", nargs="+", default=[], metavar="KEY",
        help="that requests must bring; JPAGED_API_KEY and VLLM_API_KEY do as well",
    )  # fmt: skip
    http("--open-metrics", action="store_true", help="/metrics needs no key")
    http("--max-body-bytes", type=_size, default=32 << 20, metavar="N")
    http(
        "--stall-timeout", type=float, default=120.0, metavar="S",
        help="seconds without a step after which /health is 503 (default: 120)",
    )  # fmt: skip
    http(
        "--client-timeout", type=float, default=600.0, metavar="S",
        help="seconds that a client may read nothing (default: 600)",
    )  # fmt: skip
    http("--sse-keep-alive-interval", type=float, default=0.0, metavar="S")
    http(
        "--shutdown-timeout", type=float, default=0.0, metavar="S",
        help="seconds that answers have to end after SIGTERM (default: 0)",
    )  # fmt: skip
    http("--timeout-keep-alive", type=int, default=5, metavar="S")
    for name in ("origins", "methods", "headers"):
        default = [] if name == "origins" else ["*"]
        http(f"--allowed-{name}", type=_json_list, default=default, metavar="JSON", help="CORS")
    http("--allow-credentials", action="store_true", help="CORS")
    http("--root-path", default="", help="that a proxy has cut off")
    for name in ("keyfile", "certfile", "ca-certs"):
        http(f"--ssl-{name}", metavar="FILE")
    http("--ssl-cert-reqs", type=int, default=0, choices=(0, 1, 2))
    http("--ssl-ciphers", default="TLSv1")

    log = parser.add_argument_group("logs").add_argument
    log("--enable-log-requests", action="store_true", help="a line for each request")
    log("--log-stats-interval", type=float, default=10.0, metavar="S", help="0: no lines")
    log(
        "--log-level", "--uvicorn-log-level", default="info",
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip
    log("--otlp-traces-endpoint", metavar="URL", help="where OpenTelemetry traces go")
    parser.add_argument(
        "--engine-factory", metavar="MODULE:FUNCTION", help=argparse.SUPPRESS,
        default="server.engine_process:make_engines",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="flags as YAML; the command line's count")


class _InOrder(argparse.Action):
    """Remembers that names belong to the model before them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Adds to `ordered`."""
        pairs: list[tuple[str, Any]] = list(getattr(namespace, "ordered", ()))
        pairs.append((self.dest, values))
        namespace.ordered = pairs


def read_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Reads command line, configuration file and environment.

    Raises:
        ValueError: Naming the flag at fault.
        SystemExit: As argparse does, after a line that says why.
    """
    parser = argparse.ArgumentParser(
        prog="jpaged serve",
        description="Serve models over an OpenAI-compatible API.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    arguments, warnings = _sort_out(_with_config_file(list(arguments)))
    args = parser.parse_args(arguments)
    for warning in warnings:
        print(f"jpaged: warning: {warning}", file=sys.stderr)
    models = _models(args)
    keys = [key for group in args.api_key for key in group]
    for name in ("JPAGED_API_KEY", "VLLM_API_KEY"):
        keys += [key for key in [environment.get(name, "")] if key]
    if not all(key and key.isprintable() for key in keys):
        raise ValueError("--api-key is empty or holds characters that cannot be printed")
    _check(args)
    http = HttpOptions(
        api_keys=keys,
        guards_metrics=not args.open_metrics,
        max_body_bytes=args.max_body_bytes,
        stall_s=args.stall_timeout,
        patience_s=args.client_timeout,
        keep_alive_s=args.sse_keep_alive_interval,
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        logs_requests=args.enable_log_requests,
    )
    return Options(models, _engine_config(args), http, args.host, args.port, args)


def _check(args: argparse.Namespace) -> None:
    """What argparse has not: ranges, and files that must be there."""
    ranges = {
        "port": (0, 65535), "stall_timeout": (1, None), "client_timeout": (1, None),
        "shutdown_timeout": (0, None), "max_num_queued_reqs": (0, None),
        "max_body_bytes": (1024, None), "sse_keep_alive_interval": (0, None),
        "log_stats_interval": (0, None),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}")
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path and not Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')} is {path}; there is no such file")


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    try:
        return EngineConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=None if args.max_model_len == -1 else args.max_model_len,
            block_size=args.block_size,
            num_blocks=args.num_gpu_blocks_override,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            watermark=args.watermark,
            scheduling_policy=args.scheduling_policy,
            dtype=args.dtype,
            attention_backend=args.attention_backend,
            max_logprobs=args.max_logprobs,
            logprobs_mode=args.logprobs_mode,
            seed=args.seed,
        )
    except ValueError as error:
        names = {
            "memory_utilization": "gpu_memory_utilization",
            "num_blocks": "num_gpu_blocks_override",
        }
        text = re.sub(
            r"EngineConfig\.(\w+)",
            lambda found: "--" + names.get(found[1], found[1]).replace("_", "-"),
            str(error),
        )
        raise ValueError(text) from None


def _models(args: argparse.Namespace) -> list[ModelOptions]:
    models: list[ModelOptions] = []
    for text in args.models:
        name, equals, path = text.partition("=")
        is_named = equals and not Path(text).exists()
        models.append(ModelOptions([name], path) if is_named else ModelOptions([], text))
    lone_names: list[str] = []
    has_flags = False
    for kind, values in getattr(args, "ordered", ()):
        if kind == "model":
            if not has_flags and models:
                raise ValueError("models are given both as arguments and by --model; choose one")
            models.append(ModelOptions([], values))
            has_flags = True
        elif has_flags:
            models[-1].names += values
        else:
            lone_names += values
    models = models or [ModelOptions([], DEFAULT_MODEL)]
    if lone_names:
        if len(models) > 1:
            raise ValueError(
                "--served-model-name names one model, and there are several: give NAME=MODEL for "
                "each, or --served-model-name after each --model"
            )
        models[0].names += lone_names
    for model in models:
        if not model.path or not all(model.names):
            raise ValueError(
                f"a model is given as {model.names or ''}={model.path}; give NAME=MODEL"
            )
        model.names = list(dict.fromkeys(model.names or [model.path]))
    taken: set[str] = set()
    for model in models:
        for name in model.names:
            if name in taken:
                raise ValueError(f"two models are called {name!r}; give each names of its own")
            taken.add(name)
    _share_out(models, [text for group in args.kv_cache_share for text in group])
    return models


def _share_out(models: list[ModelOptions], texts: Sequence[str]) -> None:
    shares: dict[str, float] = {}
    by_name = {name: model for model in models for name in model.names}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in by_name or not 0 < share <= 1:
            raise ValueError(
                f"--kv-cache-share is {text!r}; give NAME=X with a model's name and X from 0 to 1"
            )
        shares[by_name[name].names[0]] = share
    left = 1.0 - sum(shares.values())
    others = [model for model in models if model.names[0] not in shares]
    if left < -1e-9 or (others and left <= 0):
        raise ValueError(f"--kv-cache-share adds up to {1 - left:g}; there is 1 to share")
    for model in models:
        model.memory_share = shares.get(model.names[0], left / len(others) if others else 0.0)


def _with_config_file(arguments: list[str]) -> list[str]:
    """The flags of `--config`, in front of those of the command line, which thus count."""
    for index, argument in enumerate(arguments):
        if argument != "--config" and not argument.startswith("--config="):
            continue
        _, equals, path = argument.partition("=")
        path = path if equals else (arguments[index + 1 : index + 2] or [""])[0]
        rest = arguments[:index] + arguments[index + (1 if equals else 2) :]
        try:
            settings: Any = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config is {path!r}, which cannot be read: {error}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"--config is {path!r}; it must hold flags, a line each: NAME: VALUE")
        given: list[str] = []
        for key, value in cast(dict[Any, Any], settings).items():
            flag = "--" + str(key).replace("_", "-")
            if value is True:
                given.append(flag)
            elif value is False or value is None:
                if flag == "--enable-prefix-caching":
                    given.append("--no-enable-prefix-caching")
            elif isinstance(value, list):
                given += [flag, *map(str, cast(list[Any], value))]
            elif isinstance(value, dict):
                given += [flag, yaml.safe_dump(value, default_flow_style=True).strip()]
            else:
                given += [flag, str(value)]
        return given + rest
    return arguments


def _sort_out(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Takes out flags that mean nothing here; returns the others and what is to be said.

    Raises:
        ValueError: If one asks for what there is not.
    """
    kept: list[str] = []
    warnings: list[str] = []
    place = 0
    while place < len(arguments):
        flag, equals, value = arguments[place].partition("=")
        flag = _SHORT.get(flag, flag)
        place += 1
        if flag in GONE_FLAGS:
            count, meaning = GONE_FLAGS[flag]
            warnings.append(f"{flag} does nothing here: {meaning}")
            place += count if not equals else 0
        elif flag in REFUSED_FLAGS:
            allowed, reason = REFUSED_FLAGS[flag]
            if flag not in _NO_ARGUMENT and not equals:
                value = (arguments[place : place + 1] or [""])[0]
                place += 1
            if value not in allowed or not allowed:
                raise ValueError(f"{flag} {value}".strip() + f" is not offered: {reason}")
        else:
            kept.append(arguments[place - 1])
    return kept, warnings


def _size(text: str) -> int:
    """A number, with k, m or g for thousands and K, M or G for 1024, as in vLLM; auto: -1."""
    if text == "auto":
        return -1
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, such as 4096, 4k or 4K")
    letter = found[2]
    base = 1024 if letter.isupper() else 1000
    value = float(found[1]) * base ** ("kmgt".index(letter.lower()) + 1 if letter else 0)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(value)


def _json_list(text: str) -> list[str]:
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    entries: list[Any] = cast(list[Any], value) if isinstance(value, list) else [None]
    if not all(isinstance(entry, str) for entry in entries):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON list of texts")
    return entries


def jax_environment(args: argparse.Namespace) -> dict[str, str]:
    """Variables for the engine process, by what the flags say of the device."""
    environment: dict[str, str] = {}
    if args.device != "auto":
        environment["JAX_PLATFORMS"] = "cpu" if args.device == "cpu" else "cuda"
    # Of what JAX may take the engine plans to take a share; JAX's own default is 0.75.
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    environment[name] = os.environ.get(name, "0.95")
    return environment
