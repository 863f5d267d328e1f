"""The flags of `jpaged serve`: vLLM's names and defaults wherever jpaged has the thing."""

import argparse
import json
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
from server.other_flags import sort_out

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that mean something; `read_options` sorts out the others."""
    parser.add_argument(
        "models", nargs="*", metavar="[NAME=]MODEL",
        help="smollm2 (the default), a Hugging Face or Orbax directory, a hub id, or a .gguf file; "
        "several are served under their names",
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
    engine("--max-model-len", type=_size, metavar="N",
           help="tokens of prompt and answer, such as 8k (default: -1 or auto, the model's, or "
           "what the KV cache holds if that is less)")  # fmt: skip
    engine("--max-num-seqs", type=int, metavar="N",
           help="requests in one step at most (default: 16 on CPU, 256 on GPU)")  # fmt: skip
    engine("--max-num-batched-tokens", type=_size, metavar="N",
           help="tokens in one step at most (default: 256 on CPU, 2048 on GPU)")  # fmt: skip
    engine(
        "--block-size", type=int, default=16, metavar="N", help="tokens per KV block (default: 16)"
    )
    engine("--gpu-memory-utilization", type=float, default=0.92, metavar="X",
           help="share of memory for weights, workspace and KV cache (default: 0.92); on CPU "
           "the cache takes 1 GiB at most unless --kv-cache-memory-bytes says more")  # fmt: skip
    engine("--kv-cache-memory-bytes", type=_size, metavar="N", 
           help="KV cache of all models (default: by --gpu-memory-utilization)")  # fmt: skip
    engine("--num-gpu-blocks-override", type=int, metavar="N", 
           help="KV blocks of each model (default: by memory)")  # fmt: skip
    engine("--kv-cache-share", action="append", nargs="+", default=[], metavar="NAME=X",
           help="parts of the KV memory by model (default: equal)")  # fmt: skip
    engine("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    engine("--long-prefill-token-threshold", type=int, default=0, metavar="N",
           help="tokens of one prompt in a step at most (default: 0, no limit)")  # fmt: skip
    engine("--watermark", type=float, default=0.01, metavar="X",
           help="share of blocks kept free when a request is admitted (default: 0.01)")  # fmt: skip
    engine("--scheduling-policy", default="fcfs", choices=("fcfs", "priority"))
    engine("--max-num-queued-reqs", type=int, metavar="N",
           help="waiting requests; more get 503 (default: no limit)")  # fmt: skip
    engine("--max-logprobs", type=int, default=20, metavar="N",
           help="log-probabilities that may be asked for; -1: all (default: 20)")  # fmt: skip
    engine("--logprobs-mode", default="raw_logprobs", choices=LOGPROBS_MODES)
    engine("--attention-backend", default="auto", choices=ATTENTION_BACKENDS)
    engine("--seed", type=int, default=0,
           help="of requests that bring none (default: 0)")  # fmt: skip

    http = parser.add_argument_group("HTTP").add_argument
    http("--host", default="0.0.0.0", help="address to listen at (default: all)")
    http("--port", type=int, default=8000, help="port to listen at (default: 8000)")
    http(
        "--api-key", action="append", nargs="+", default=[], metavar="KEY",
        help="that requests must bring (default: JPAGED_API_KEY or VLLM_API_KEY, if set)",
    )  # fmt: skip
    http("--open-metrics", action="store_true", help="/metrics needs no key")
    http("--max-body-bytes", type=_size, default=32 << 20, metavar="N",
         help="of a request (default: 32M)")  # fmt: skip
    http(
        "--stall-timeout", type=float, default=120.0, metavar="S",
        help="seconds without a step after which /health is 503 (default: 120)",
    )  # fmt: skip
    http(
        "--client-timeout", type=float, default=600.0, metavar="S",
        help="seconds that a client may read nothing (default: 600)",
    )  # fmt: skip
    http("--sse-keep-alive-interval", type=float, default=0.0, metavar="S",
         help="seconds of silence until a comment is sent (default: 0, none)")  # fmt: skip
    http(
        "--shutdown-timeout", type=float, default=0.0, metavar="S",
        help="seconds that answers have to end after SIGTERM (default: 0)",
    )  # fmt: skip
    http("--timeout-keep-alive", type=int, default=5, metavar="S",
         help="seconds that an idle connection stays open (default: 5)")  # fmt: skip
    for name in ("origins", "methods", "headers"):
        default = [] if name == "origins" else ["*"]
        http(f"--allowed-{name}", type=_json_list, default=default, metavar="JSON", help="CORS")
    http("--allow-credentials", action="store_true", help="CORS")
    http("--root-path", default="", metavar="PATH",
         help="prefix under which a proxy offers the server, cut off by it or not")  # fmt: skip
    http("--stream-interval", type=int, default=1, metavar="N",
         help="tokens of an event of a stream at least (default: 1)")  # fmt: skip
    http("--enable-force-include-usage", action="store_true",
         help="every stream ends with its usage")  # fmt: skip
    for name in ("keyfile", "certfile", "ca-certs"):
        http(f"--ssl-{name}", metavar="FILE")
    http("--ssl-cert-reqs", type=int, default=0, choices=(0, 1, 2))
    http("--ssl-ciphers", default="TLSv1")

    log = parser.add_argument_group("logs").add_argument
    log(
        "--enable-log-requests", action="store_true", help="a line for each request (default: none)"
    )
    log("--log-stats-interval", type=float, default=10.0, metavar="S",
        help="seconds between lines on the engines; 0: none (default: 10)")  # fmt: skip
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
    args, warnings = _parse(parser, list(arguments))
    for warning in warnings:
        print(f"jpaged: warning: {warning}", file=sys.stderr)
    models = _models(args)
    keys = [key for group in args.api_key for key in group]
    if not keys:  # as in vLLM: the flag instead of the variable
        found = (environment.get(name, "") for name in ("JPAGED_API_KEY", "VLLM_API_KEY"))
        keys = [key for key in found if key]
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
        root_path=args.root_path.rstrip("/"),
    )
    return Options(models, _engine_config(args), http, args.host, args.port, args)


def _parse(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of the command line and of `--config`, and what is to be said of them."""
    arguments, warnings = sort_out(arguments)
    args = parser.parse_args(arguments)
    if args.config is None:
        return args, warnings
    merged, more = sort_out(_merge(_read_config_file(args.config), args, arguments))
    return parser.parse_args(merged), warnings + more


def _check(args: argparse.Namespace) -> None:
    """What argparse has not: ranges, and files that must be there."""
    ranges = {
        "port": (0, 65535), "stall_timeout": (1, None), "client_timeout": (1, None),
        "shutdown_timeout": (0, None), "max_num_queued_reqs": (0, None),
        "max_body_bytes": (1024, None), "sse_keep_alive_interval": (0, None),
        "log_stats_interval": (0, None), "stream_interval": (1, None),
        "timeout_keep_alive": (0, None),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}")
    if args.root_path and not args.root_path.startswith("/"):
        raise ValueError(f"--root-path is {args.root_path!r}; it must begin with '/'")
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
        raise ValueError(as_flags(str(error))) from None


def as_flags(text: str) -> str:
    """A message of the engine's in which fields of its configuration go by their flags."""
    names = {
        "memory_utilization": "gpu_memory_utilization",
        "num_blocks": "num_gpu_blocks_override",
    }
    return re.sub(
        r"EngineConfig\.(\w+)",
        lambda found: "--" + names.get(found[1], found[1]).replace("_", "-"),
        text,
    )


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
    if left < -1e-9 or (left <= 0 if others else abs(left) > 1e-9):
        raise ValueError(
            f"--kv-cache-share adds up to {1 - left:g}; there is 1 to share"
            + (" and no other model" if not others else "")
        )
    for model in models:
        model.memory_share = shares.get(model.names[0], left / len(others) if others else 0.0)


def _read_config_file(path: str) -> dict[str, list[str]]:
    """Arguments of each flag in a YAML file."""
    try:
        settings: Any = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config is {path!r}, which cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"--config is {path!r}; it must hold flags, a line each: NAME: VALUE")
    flags: dict[str, list[str]] = {}
    for key, value in cast(dict[Any, Any], settings).items():
        flag = "--" + str(key).replace("_", "-")
        if value is True:
            flags[flag] = []
        elif value is False or value is None:
            if flag == "--enable-prefix-caching" and value is False:
                flags["--no-enable-prefix-caching"] = []
        elif isinstance(value, list) and not flag.startswith("--allowed-"):
            flags[flag] = [str(entry) for entry in cast(list[Any], value)]
        elif isinstance(value, list | dict):
            flags[flag] = [json.dumps(value)]
        else:
            flags[flag] = [str(value)]
    return flags


def _merge(
    flags: dict[str, list[str]], given: argparse.Namespace, arguments: list[str]
) -> list[str]:
    """Arguments of a file and of a command line, whose word on the same thing counts."""
    told = {argument.partition("=")[0] for argument in arguments}
    switches = {"--enable-prefix-caching", "--no-enable-prefix-caching"}
    if switches & told:
        told |= switches
    if given.models or "--model" in told:
        told |= {"--model", "--served-model-name"}
    merged: list[str] = []
    for flag, values in flags.items():
        if flag not in told:
            # One text each, so that a value that begins with "-" is one.
            alone = len(values) == 1 or flag == "--model"
            merged += [f"{flag}={value}" for value in values] if alone else [flag, *values]
    # Behind the command line, whose models a flag of several values would take for its own.
    return arguments + merged


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
