"""Flags of vLLM, now or once, that jpaged has nothing for: said what they mean, or refused."""

import re
from collections.abc import Mapping

# What mean nothing here, and what to say of them.
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
    "--compilation-config": (1, "XLA compiles every step; there are no levels"),
    "--optimization-level": (1, "XLA compiles every step; there are no levels"),
    "--performance-mode": (1, "give --max-num-seqs and --max-num-batched-tokens"),
    "--cudagraph-capture-sizes": (-1, "steps are compiled for buckets of their own"),
    "--jit-monitor-mode": (1, "jpaged:compilations_after_warm_up counts at /metrics"),
    "--distributed-executor-backend": (1, "one process runs the engines"),
    "--config-format": (1, "the format is told by the files"),
    "--disable-hybrid-kv-cache-manager": (0, "there is one KV cache manager"),
    "--fingerprint-mode": (1, "answers carry no system_fingerprint"),
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
    "--api-server-count": (("1",), "one process serves HTTP"),
    "--enable-expert-parallel": ((), "a model runs on one device"),
    "--decode-context-parallel-size": (("1",), "a model runs on one device"),
    "--prefill-context-parallel-size": (("1",), "a model runs on one device"),
    "--headless": ((), "one process serves HTTP"),
    "--limit-mm-per-prompt": ((), "models read text only"),
    "--kv-offloading-size": ((), "KV blocks stay on the device"),
    "--kv-offloading-backend": ((), "KV blocks stay on the device"),
    "--spec-method": ((), "speculative decoding is not offered yet"),
    "--spec-model": ((), "speculative decoding is not offered yet"),
    "--spec-tokens": ((), "speculative decoding is not offered yet"),
    "--max-loras": ((), "LoRA adapters are not offered yet"),
    "--max-lora-rank": ((), "LoRA adapters are not offered yet"),
    "--structured-outputs-config": ((), "structured output is not offered yet"),
    "--structured-outputs-config.backend": (("auto",), "structured output is not offered yet"),
    "--logits-processors": ((), "give them to jpaged.LLM; requests over HTTP cannot name them"),
    "--enable-log-outputs": ((), "answers are not logged"),
}  # fmt: skip
_NO_ARGUMENT = frozenset(
    {
        "--trust-remote-code", "--skip-tokenizer-init", "--enable-lora",
        "--enable-auto-tool-choice", "--enable-reasoning", "--enable-sleep-mode",
        "--enable-prompt-embeds", "--enable-expert-parallel", "--headless",
        "--enable-log-outputs",
    }
)  # fmt: skip
_SHORT = {"-q": "--quantization", "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size",
          "-pp": "--pipeline-parallel-size", "-ep": "--enable-expert-parallel",
          "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
          "-cc": "--compilation-config"}  # fmt: skip


def sort_out(arguments: list[str]) -> tuple[list[str], list[str]]:
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
        if re.fullmatch(r"-O\d?", flag):
            flag, equals = "--optimization-level", equals or flag[2:]
        if flag in GONE_FLAGS:
            count, meaning = GONE_FLAGS[flag]
            warnings.append(f"{flag} does nothing here: {meaning}")
            if count < 0:  # as many as there are
                while place < len(arguments) and not arguments[place].startswith("-"):
                    place += 1
            elif not equals:
                place += count
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
