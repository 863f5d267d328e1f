"""Records what transformers answers, as small JSON files beside this one.

Run by `scripts/make_goldens`, in an environment of its own, because transformers computes with
PyTorch and `.venv` may not hold it. Each file says how it was made. Answers are greedy, in
float32, one request at a time; end-of-sequence ids do not end them. Every answer is generated, and
then scored once more in a single pass over prompt and answer, without a cache: log-probabilities
and margins are those of the second pass.

The tests compare ids by the near-tie rule: an answer may leave the recorded one at a step whose
margin (best logit minus second best) is below 1e-3, and is not compared after it.

Usage: record.py SMOLLM2_DIRECTORY GEMMA3_FILE, a Hugging Face directory of the demo model and
the GGUF file of Gemma 3, which transformers reads by itself.
"""

import json
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDENS = Path(__file__).parent
sys.path.insert(0, str(GOLDENS.parents[1]))

from tests import tiny_models  # noqa: E402 - found through the line above

TINY_PROMPT_LENGTHS = (1, 15, 16, 17, 33, 65)
LONG_PROMPT_LENGTH = 300  # far beyond llama3-rope's original 64 positions
TINY_ANSWER_LENGTH = 24
LENGTHS_WITH_LOGITS = (17, 65, LONG_PROMPT_LENGTH)

TEXTS = (
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\tindented\twith tabs",
    "Hello",
    " Hello",
    "Hello, world!",
    "hello  two   three    four spaces",
    "trailing space ",
    "Line one\nLine two\r\nLine three\n",
    "It's they're we'll I'd don't CAN'T",
    "The quick brown fox jumps over the lazy dog.",
    "1234567890",
    "3.14159 -2,718 1e-10 0x1F 12:34:56 2026-11-29",
    "a1b22c333d4444",
    "$1,299.99 (20% off) #1 & more @home",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "for (int i = 0; i < n; ++i) { sum += x[i] * y[i]; }",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    '<div class="box"><p>Text</p></div><!-- comment -->',
    "SELECT * FROM users WHERE name = 'O''Brien';",
    "https://example.org/path?query=1&other=%20#fragment",
    "naïve café résumé Ångström Straße",
    "Zażółć gęślą jaźń",
    "Съешь ещё этих мягких французских булок",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία",
    "今日は良い天気ですね。東京タワー",
    "天地玄黄，宇宙洪荒。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع",
    "דג סקרן שט בים",
    "ऋषियों को सताने वाले दुष्ट",
    "👩‍👩‍👧‍👦 🇫🇷🇯🇵 👍🏽",
    "e\u0301 o\u0308 n\u0303 combining",
    "zero\u200bwidth non\u00a0breaking \u2026 \u2014 \u201cquotes\u201d",
    "∑∫√∞ ≤ ≥ ≠ α β γ → ←",
    "<|im_start|>user\nHi<|im_end|>\n",
    "almost <|im_start a special token |>",
    "<|endoftext|>",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "supercalifragilisticexpialidocious",
)

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Which colour does a clear sky have?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a helpful AI assistant named SmolLM."},
        {"role": "user", "content": "Count from one to five.\n\nUse  words."},
        {"role": "assistant", "content": "One, two, three, four, five."},
        {"role": "user", "content": "Now backwards."},
    ],
    [{"role": "user", "content": "  Übersetze „Guten Morgen“ 🙂 ins Englische  "}],
)

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
)
# Longer than the window of most of Gemma 3's layers, 512 tokens.
LONG_PROMPT = "\n".join(
    f"{a} times {b} is {a * b}." for a in range(2, 10) for b in range(2, 10)
)  # fmt: skip
ANSWER_LENGTH = 48
CHAT_ANSWER_LENGTH = 32


def load(directory: Path) -> Any:
    """The directory's model in float32, with attention as plain products."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def generate(model: Any, prompt: list[int], num_tokens: int, num_tokens_known: int) -> list[int]:
    """The greedy answer among the ids that the tokenizer knows."""
    token_ids, cache, answer = torch.tensor([prompt]), transformers.DynamicCache(), []
    for _ in range(num_tokens):
        output = model(token_ids, cache=cache, use_cache=True)
        answer.append(int(output.logits[0, -1, :num_tokens_known].argmax()))
        token_ids = torch.tensor([answer[-1:]])
    return answer


@torch.no_grad()
def score(model: Any, prompt: list[int], answer: list[int], num_tokens_known: int) -> np.ndarray:
    """Logits `[len(answer), num_tokens_known]` from which each answer token was chosen."""
    output = model(torch.tensor([prompt + answer]), use_cache=False)
    return output.logits[0, len(prompt) - 1 : -1, :num_tokens_known].double().numpy()


def record_answer(
    model: Any, prompt: list[int], answer: list[int], num_tokens_known: int
) -> tuple[dict[str, Any], np.ndarray]:
    """One golden answer and its logits, once scoring agrees that the answer is greedy."""
    logits = score(model, prompt, answer, num_tokens_known)
    second, best = np.sort(logits, axis=1)[:, -2:].T
    margins = best - second
    for chosen, row, margin in zip(answer, logits, margins, strict=True):
        if row.argmax() != chosen and margin >= 1e-3:
            raise RuntimeError(f"the answer has {chosen}, scoring {row.argmax()} by {margin}")
    largest = logits.max(axis=1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=1))
    logprobs = logits[np.arange(len(answer)), answer] - log_sums
    record = {
        "prompt_token_ids": prompt,
        "token_ids": answer,
        "logprobs": rounded(logprobs),
        "margins": rounded(margins),
    }
    return record, logits


def rounded(values: np.ndarray) -> list[float]:
    """The values as plain numbers of six decimals."""
    return [round(float(value), 6) for value in values]


def record_tiny(variant: str, directory: Path) -> dict[str, Any]:
    """Goldens of one tiny model."""
    model = load(tiny_models.write_tiny_model(directory, variant))
    random = np.random.Generator(np.random.PCG64(0))
    lengths = TINY_PROMPT_LENGTHS
    if variant == "llama3-rope":
        lengths += (LONG_PROMPT_LENGTH,)
    records = []
    for length in lengths:
        prompt = random.integers(0, tiny_models.NUM_BYTES, length).tolist()
        answer = generate(model, prompt, TINY_ANSWER_LENGTH, tiny_models.NUM_TOKENS_KNOWN)
        record, logits = record_answer(model, prompt, answer, tiny_models.NUM_TOKENS_KNOWN)
        if length in LENGTHS_WITH_LOGITS:
            record["logits_after_prompt"] = rounded(logits[0])
        records.append(record)
    return {
        "weights_sha256": tiny_models.weights_sha256(tiny_models.tiny_weights(variant)),
        "answers": records,
    }


def record_family(variant: str, directory: Path) -> dict[str, Any]:
    """Goldens of a tiny model of some family: logits at every position, and answers.

    There are none of models whose rotary embeddings depend on how long a text has become:
    transformers changes them on the way, jpaged takes those of the longest request from the start.
    """
    content: dict[str, Any] = {
        "weights_sha256": tiny_models.weights_sha256(tiny_models.tiny_weights(variant))
    }
    if variant not in tiny_models.GROWING_ROPES:
        content = record_tiny(variant, directory)
    model = load(tiny_models.write_tiny_model(directory, variant))
    token_ids = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 96).tolist()
    shown = list(range(0, tiny_models.NUM_TOKENS_KNOWN, 13))
    content["sequences"] = []
    for length in (48, 96):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids[:length]]), use_cache=False).logits[0]
        content["sequences"].append(
            {
                "token_ids": token_ids[:length],
                "shown_ids": shown,
                "logits": [rounded(row[shown]) for row in logits.double().numpy()],
            }
        )
    return content


def record_text(directory: Path) -> dict[str, Any]:
    """Goldens of the demo model's tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts, chats = [], []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        texts.append(
            {
                "text": text,
                "token_ids": ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                "decoded_with_special_tokens": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    for messages in CHATS:
        chats.append(
            {
                "messages": messages,
                "rendered": tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                ),
                "rendered_without_generation_prompt": tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=False
                ),
                "token_ids": chat_token_ids(tokenizer, messages),
            }
        )
    return {"vocab_size": len(tokenizer), "texts": texts, "chats": chats}


def chat_token_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Ids of the rendered chat, ready for an answer."""
    return tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def record_smollm2(directory: Path) -> dict[str, Any]:
    """Goldens of the demo model's answers."""
    model, tokenizer = load(directory), AutoTokenizer.from_pretrained(directory)
    jobs = [({"prompt": text}, tokenizer(text)["input_ids"], ANSWER_LENGTH) for text in PROMPTS]
    jobs += [
        ({"messages": chat}, chat_token_ids(tokenizer, chat), CHAT_ANSWER_LENGTH)
        for chat in CHATS[:4]
    ]
    records = []
    for asked, prompt, num_tokens in jobs:
        answer = generate(model, prompt, num_tokens, len(tokenizer))
        record, _ = record_answer(model, prompt, answer, len(tokenizer))
        text = tokenizer.decode(record["token_ids"], skip_special_tokens=True)
        records.append(asked | {"text": text} | record)
        print(json.dumps(text, ensure_ascii=False), flush=True)
    return {"answers": records}


def record_gemma3(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Goldens of Gemma 3's tokenizer and of its answers."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    texts = []
    for text in (*TEXTS, LONG_PROMPT):
        ids = tokenizer(text)["input_ids"]
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append({"text": text, "token_ids": ids, "decoded": decoded})
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    records = []
    for prompt in (*PROMPTS, LONG_PROMPT):
        ids = tokenizer(prompt)["input_ids"]
        answer = generate(model, ids, ANSWER_LENGTH, len(tokenizer))
        record, _ = record_answer(model, ids, answer, len(tokenizer))
        text = tokenizer.decode(record["token_ids"], skip_special_tokens=True)
        records.append({"prompt": prompt, "text": text} | record)
        print(json.dumps(text, ensure_ascii=False), flush=True)
    return {"vocab_size": len(tokenizer), "texts": texts}, {"answers": records}


def record_workload(directory: Path, name: str) -> dict[str, Any]:
    """Goldens of a benchmark's requests, whose answers the file has already.

    Generating thousands of tokens takes minutes; scoring proves as much, since an answer is
    the greedy one exactly if each of its tokens is the best one after those before it.
    """
    model = load(directory)
    num_tokens_known = len(AutoTokenizer.from_pretrained(directory))
    records = []
    for known in json.loads(path_of(name).read_text())["answers"]:
        record, _ = record_answer(
            model, known["prompt_token_ids"], known["token_ids"], num_tokens_known
        )
        del record["logprobs"]  # ids and margins say enough
        records.append(record)
    return {"answers": records}


def path_of(name: str) -> Path:
    """Where the golden file of that name is."""
    return GOLDENS / f"{name}.json"


def write(name: str, content: dict[str, Any]) -> None:
    """Writes one golden file, a line per list of numbers."""
    made = {
        "command": "scripts/make_goldens",
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "settings": "float32, CPU, eager attention, one request at a time; eos does not end it",
    }
    path = path_of(name)
    path.write_text(dump({"made": made} | content) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def dump(value: Any, indent: str = "") -> str:
    """JSON in which lists of numbers stay on one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {dump(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return "[\n" + ",\n".join(inner + dump(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def main() -> None:
    """Records every golden file."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the same sums on every machine
    smollm2, gemma3 = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        for variant in tiny_models.VARIANTS:
            write(f"tiny-{variant}", record_tiny(variant, Path(temporary) / variant))
        for variant in tiny_models.FAMILY_VARIANTS:
            write(f"tiny-{variant}", record_family(variant, Path(temporary) / variant))
    write("smollm2-text", record_text(smollm2))
    write("smollm2-answers", record_smollm2(smollm2))
    for workload in ("smollm2-workload-A", "smollm2-workload-B"):
        write(workload, record_workload(smollm2, workload))
    for name, content in zip(("gemma3-text", "gemma3-answers"), record_gemma3(gemma3), strict=True):
        write(name, content)


if __name__ == "__main__":
    main()
