"""The `jpaged` command. Each sub-command imports what it needs when it is called."""

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jpaged.config import ATTENTION_BACKENDS, EngineConfig
from jpaged.sampling_params import SamplingParams

_DESCRIPTION = """\
Run language models with a paged KV cache, in JAX.

  jpaged generate "What is the capital of France?"    answer one prompt or several
  jpaged chat                                         talk to the model
  jpaged serve                                        answer OpenAI's API over HTTP
  jpaged warmup MODEL                                 compile ahead of time
  jpaged convert MODEL DIRECTORY                      write it as an Orbax checkpoint, or back
"""

_MODEL_HELP = (
    "smollm2 (a small demo model) or gemma3, fetched on first use; a Hugging Face or Orbax "
    "directory, a hub id org/name, or a .gguf file (default: smollm2)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:  # its flags are vLLM's, read by the server itself
        from server.serve import main as serve

        return serve(given[1:])
    parser = _make_parser()
    args = parser.parse_args(given)
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if args.command is None:
        parser.print_help()
        return 0
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        return args.run(args)
    except BrokenPipeError:
        # Whoever read our output has left; what is buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"jpaged: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jpaged",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt or several")
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="what to answer (default: standard input)"
    )
    generate.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it is, without the model's chat template",
    )
    _add_model(generate)
    generate.add_argument(
        "-n",
        type=int,
        metavar="N",
        help="answers to each prompt (default: 1); more need a --temperature",
    )
    _add_sampling(generate, max_tokens=256, temperature=0.0)
    _add_engine(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat", help="talk to the model; with piped input, one line is one turn"
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_model(chat)
    # Small models repeat themselves in a greedy conversation.
    _add_sampling(chat, max_tokens=512, temperature=0.7)
    _add_engine(chat)
    chat.set_defaults(run=_chat)

    warmup = commands.add_parser(
        "warmup", help="compile all programs of a model into the cache, e.g. to ship in an image"
    )
    warmup.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help=_MODEL_HELP)
    warmup.add_argument("--revision", help="branch, tag or commit of a hub id")
    _add_engine(warmup)
    warmup.set_defaults(run=_warmup)

    convert = commands.add_parser(
        "convert",
        help="write a model anew: as an Orbax checkpoint, or as safetensors",
        description="Write a model anew, as one directory that is served and copied like any "
        "other: weights, config, tokenizer, licence. It appears when it is whole; what was "
        "interrupted is gone on with by the same command.",
    )
    convert.add_argument("source", metavar="SOURCE", help=_MODEL_HELP.partition(" (default")[0])
    convert.add_argument("target", metavar="TARGET", help="the directory to make")
    convert.add_argument(
        "--to",
        default="orbax",
        metavar="FORMAT",
        help="orbax (sharded, OCDBT) or safetensors (default: %(default)s)",
    )
    convert.add_argument(
        "--dtype",
        default="keep",
        help="keep, float32, bfloat16 or float16 (default: %(default)s; what GGUF has quantised "
        "is kept as float32)",
    )
    convert.add_argument("--revision", help="branch, tag or commit of a hub id")
    convert.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    convert.set_defaults(run=_convert, verbose=False)

    commands.add_parser("serve", help="answer OpenAI's API over HTTP; see jpaged serve --help")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    group = parser.add_argument_group(
        "sampling", "where the model's generation_config.json says something, that is the default"
    )
    parser.set_defaults(fallbacks={"max_tokens": max_tokens, "temperature": temperature})
    numbers = (
        ("--max-tokens", int, f"tokens to generate at most (default: {max_tokens})"),
        ("--min-tokens", int, "tokens to generate at least (default: 0)"),
        (
            "--temperature",
            float,
            f"0 takes the most likely token; higher is more varied (default: {temperature})",
        ),
        ("--top-k", int, "sample among the N most likely tokens (default: all)"),
        ("--top-p", float, "sample among the likeliest tokens that make up this probability"),
        ("--min-p", float, "sample among tokens at least this much as likely as the likeliest"),
        ("--repetition-penalty", float, "above 1 makes tokens of prompt and answer less likely"),
        ("--presence-penalty", float, "above 0 makes tokens of the answer less likely"),
        ("--frequency-penalty", float, "above 0 does so each time they have come"),
        ("--seed", int, "makes a sampled answer repeatable"),
    )
    for flag, kind, text in numbers:
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before this text (may be repeated)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_const",
        const=True,
        help="do not end at the model's end of sequence",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    add(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help=f"{', '.join(ATTENTION_BACKENDS)} (default: %(default)s)",
    )
    add("--max-model-len", type=int, metavar="N", help="prompt and answer together, in tokens")
    add("--max-num-seqs", type=int, metavar="N", help="requests in one step at most")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step at most")
    add(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="tokens per KV block (default: %(default)s)",
    )
    add("--kv-cache-memory-bytes", type=int, metavar="N", help="size of the KV cache")
    add("--num-blocks", type=int, metavar="N", help="size of the KV cache, in blocks")
    add(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not share blocks between equal prefixes",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = {field.name for field in fields(EngineConfig)}
    return {name: value for name, value in vars(args).items() if name in names - {"seed"}}


def _read_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given; a mistake shows before the model loads."""
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in names}
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _make_llm(args: argparse.Namespace):
    from jpaged.llm import LLM

    with _InterruptFlag(raises_at_once=True) as interrupted:
        llm = LLM(
            args.model,
            revision=args.revision,
            show_progress=sys.stderr.isatty(),
            **_engine_options(args),
        )
        # Where Python cannot raise, as in a callback of its garbage collector, it goes on.
        if interrupted.is_set():
            raise KeyboardInterrupt
    return llm


def _generate(args: argparse.Namespace) -> int:
    given = _read_sampling(args)
    prompts = args.prompts
    if not prompts:
        if sys.stdin.isatty():
            print("jpaged: type a prompt, end with Ctrl-D", file=sys.stderr)
        prompts = [sys.stdin.read().rstrip("\n")]
    if not all(prompts):
        raise ValueError("PROMPT is empty; give a text to answer")
    with _make_llm(args) as llm:
        params = SamplingParams(**{**args.fallbacks, **llm.model_defaults, **given})
        has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        if args.raw or not has_template:
            asked: list[Any] = prompts
        else:
            asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        if len(prompts) == params.n == 1:
            _, was_interrupted = _print_stream(llm, asked[0], params)
            return 130 if was_interrupted else 0
        for prompt, output in zip(prompts, llm.generate(asked, params), strict=True):
            print(f"> {prompt}")
            for completion in output.outputs:
                number = f"[{completion.index + 1}] " if params.n > 1 else ""
                print(f"{number}{completion.text}\n")
    return 0


def _chat(args: argparse.Namespace) -> int:
    given = _read_sampling(args)
    is_interactive = sys.stdin.isatty()
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with _make_llm(args) as llm:
        params = SamplingParams(**{**args.fallbacks, **llm.model_defaults, **given})
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError(
                f"model {args.model!r} has no chat template; use jpaged generate --raw"
            )
        if is_interactive:
            print(
                "Type a message; Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D ends.",
                file=sys.stderr,
            )
        start = len(messages)
        while (line := _read_line(is_interactive)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                del messages[start:]
                continue
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer, was_interrupted = _print_stream(llm, messages, params)
            except ValueError as error:  # too long, say: the conversation can go on
                if not is_interactive:
                    raise
                print(f"jpaged: {error}. /reset starts over.", file=sys.stderr)
                messages.pop()
                continue
            if was_interrupted and not is_interactive:
                return 130
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line(is_interactive: bool) -> str | None:
    if is_interactive:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends.", file=sys.stderr)
            return ""
    line = sys.stdin.readline()
    return line.strip() if line else None


def _print_stream(llm: Any, prompt: Any, params: SamplingParams) -> tuple[str, bool]:
    """Prints an answer as it comes; returns it, and whether Ctrl-C ended it."""
    text = ""
    finish_reason = None
    with _InterruptFlag() as interrupted:
        for delta in llm.stream([prompt], [params], should_stop=interrupted.is_set):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            text += delta.text
            if delta.output is not None:
                finish_reason = delta.output.outputs[0].finish_reason
    print()
    if finish_reason == "length":
        print(f"jpaged: stopped at --max-tokens {params.max_tokens}", file=sys.stderr)
    return text, finish_reason == "abort"


class _InterruptFlag:
    """Within it, Ctrl-C sets a flag instead of ending a step in the middle; a second one raises."""

    def __init__(self, *, raises_at_once: bool = False):
        self._count = 0
        self._max_quiet = 0 if raises_at_once else 1

    def __enter__(self) -> "_InterruptFlag":
        # A program that embeds us, or a shell that runs us in the background, has its own way.
        self._is_ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_ours:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_set(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._count > 0

    def _handle(self, signum: int, frame: Any) -> None:
        self._count += 1
        if self._count > self._max_quiet:
            raise KeyboardInterrupt


def _warmup(args: argparse.Namespace) -> int:
    import time

    started = time.perf_counter()
    with _make_llm(args) as llm:
        llm.engine.warm_up(show_progress=True)
        num_programs = llm.engine.runner.num_programs
    from jpaged.runner.compile_plan import enable_persistent_cache

    seconds = time.perf_counter() - started
    cache = enable_persistent_cache()
    kept = f"kept in {cache}" if cache else "not kept: the cache cannot be written"
    print(f"{args.model}: {num_programs} programs compiled or loaded in {seconds:.1f} s, {kept}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    import time

    from jpaged.checkpoint.convert import convert

    started = time.perf_counter()
    try:
        done = convert(
            args.source,
            args.target,
            to=args.to,
            dtype=args.dtype,
            revision=args.revision,
            show_progress=not args.quiet,
        )
    except KeyboardInterrupt:
        print("\njpaged: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    if not args.quiet:
        kept = f", {done.num_kept} of them kept from before" if done.num_kept else ""
        print(
            f"{args.target}: {done.num_tensors} tensors{kept}, {done.num_bytes / 1e6:.0f} MB, in "
            f"{time.perf_counter() - started:.1f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
