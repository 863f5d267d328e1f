import io
import json
import signal
import subprocess
import sys

import pytest

from jpaged import cli
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import LIMITS

ENGINE = [
    "--max-num-seqs=8", "--max-num-batched-tokens=64", "--max-model-len=400", "--num-blocks=96",
]  # fmt: skip


@pytest.fixture
def run(tiny_model, capsys, monkeypatch):
    """`run(command, *arguments, stdin="")` -> (exit code, standard output, standard error)."""

    def run(command, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main([command, *arguments, "--model", str(tiny_model("gqa")), *ENGINE])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def llm(tiny_model):
    from jpaged.llm import LLM

    with LLM(tiny_model("gqa"), **LIMITS) as llm:
        yield llm


def greedy_text(llm, prompt, num_tokens: int) -> str:
    from jpaged.sampling_params import SamplingParams

    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=num_tokens))
    return output.outputs[0].text


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "jpaged generate" in out and "jpaged chat" in out


@pytest.mark.parametrize("command", ["generate", "chat", "warmup"])
def test_every_command_explains_its_options(command, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    for option in ("--max-num-seqs", "--kv-cache-memory-bytes", "--dtype"):
        assert option in out
    assert ("--temperature" in out) == (command != "warmup")


def test_prompt_is_answered_as_a_message_or_raw(run, llm):
    for arguments, asked in (([], user("Hello")), (["--raw"], "Hello")):
        code, out, err = run("generate", "Hello", "--max-tokens=3", *arguments)
        assert (code, out) == (0, greedy_text(llm, asked, 3) + "\n")
        assert err == "jpaged: stopped at --max-tokens 3\n"


def test_prompt_may_come_from_standard_input(run):
    code, out, _ = run("generate", "--max-tokens=8", stdin="Hello\n")
    assert code == 0
    assert out == run("generate", "Hello", "--max-tokens=8")[1]


def test_several_prompts_are_answered_in_their_order(run, llm):
    code, out, _ = run("generate", "first", "second", "--max-tokens=6")
    assert code == 0
    answers = [greedy_text(llm, user(prompt), 6) for prompt in ("first", "second")]
    assert out == f"> first\n{answers[0]}\n\n> second\n{answers[1]}\n\n"


def test_sampling_options_reach_the_sampler(run):
    def answer(*arguments) -> str:
        return run("generate", "Hello", "--max-tokens=12", "--ignore-eos", *arguments)[1]

    seeded = answer("--temperature=1.5", "--seed=3")
    assert seeded == answer("--temperature=1.5", "--seed=3")
    assert seeded != answer("--temperature=1.5", "--seed=4")
    greedy = answer()
    assert answer("--temperature=1.5", "--seed=3", "--top-k=1") == greedy
    assert answer("--temperature=1.5", "--seed=3", "--top-p=0.001") == greedy
    assert len(answer("--max-tokens=1").encode()) < len(greedy.encode())
    stop = next(c for c in greedy[1:] if c != "\ufffd")
    assert answer("--stop", stop) == greedy[: greedy.index(stop)] + "\n"


def test_piped_lines_are_the_turns_of_one_conversation(run, llm):
    code, out, _ = run(
        "chat", "--max-tokens=8", "--temperature=0", "--system=Be brief.", stdin="Hi\n\nBye\n"
    )
    assert code == 0
    messages = [{"role": "system", "content": "Be brief."}, *user("Hi")]
    first = greedy_text(llm, messages, 8)
    messages += [{"role": "assistant", "content": first}, *user("Bye")]
    assert out == f"{first}\n{greedy_text(llm, messages, 8)}\n"


def test_conversation_can_be_reset_and_ended_by_a_line(run, llm):
    code, out, _ = run(
        "chat", "--max-tokens=8", "--temperature=0", stdin="Hi\n/reset\nHi\n/exit\nnever read\n"
    )
    first = greedy_text(llm, user("Hi"), 8)
    assert (code, out) == (0, f"{first}\n{first}\n")


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal; a shell's background job starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_interrupt_sets_a_flag_and_the_second_raises(interruptible):
    before = signal.getsignal(signal.SIGINT)
    with cli._InterruptFlag() as flag:
        assert not flag.is_set()
        signal.raise_signal(signal.SIGINT)
        assert flag.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_at_the_prompt_only_clears_the_line(monkeypatch, capsys):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert cli._read_line(is_interactive=True) == ""
    assert "Ctrl-D" in capsys.readouterr().err


def test_interrupted_answer_ends_after_its_step(run, interruptible, monkeypatch):
    whole = run("generate", "Hello", "--max-tokens=40", "--ignore-eos")[1]
    shown = []

    class Terminal(io.StringIO):
        def write(self, text):
            shown.append(text)
            if len(shown) == 2:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    code, _, _ = run("generate", "Hello", "--max-tokens=40", "--ignore-eos")
    assert code == 130
    text = out.getvalue().removesuffix("\n")
    assert whole.startswith(text) and 0 < len(text) < len(whole) - 1


def test_chat_with_a_model_without_template_is_refused(tiny_model, tmp_path, capsys, monkeypatch):
    for file in tiny_model("gqa").iterdir():
        content = file.read_bytes()
        if file.name == "tokenizer_config.json":
            config = json.loads(content)
            del config["chat_template"]
            content = json.dumps(config).encode()
        (tmp_path / file.name).write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert cli.main(["chat", "--model", str(tmp_path), *ENGINE]) == 2
    assert "has no chat template; use jpaged generate --raw" in capsys.readouterr().err


def test_warmup_compiles_every_program_ahead(tiny_model, capsys):
    assert cli.main(["warmup", str(tiny_model("gqa")), "--max-num-seqs=1", *ENGINE[1:]]) == 0
    # Two steps, copy, two state lines; to score a step of 1 or 16 and 64 tokens, 3 picks, 2 scores.
    assert "10 programs compiled or loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "Hi", "--model", "no/such/place"], "no/such/place"),
        (["generate", "Hi", "--model", ""], "no such path"),
        (["generate", "Hi", "--temperature=-1"], "temperature is -1.0"),
        (["generate", "Hi", "--max-tokens=0"], "max_tokens is 0"),
        (["generate", "Hi", "--top-p=0"], "top_p is 0.0"),
        (["generate", "Hi", "--stop="], "stop holds ''"),
        (["generate", "Hi", "--block-size=0"], "block_size is 0"),
        (["generate", "Hi", "--dtype=float64"], "dtype is 'float64'"),
        (["generate", "Hi", "--num-blocks=1", "--kv-cache-memory-bytes=9"], "give one of them"),
        (["generate", ""], "PROMPT is empty"),
        (["chat", "--max-num-seqs=0"], "max_num_seqs is 0"),
        (["warmup", "no/such/place"], "no/such/place"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jpaged: error: ") and captured.err.count("\n") == 1
    assert message in captured.err and "Traceback" not in captured.err


def test_prompt_too_long_for_the_limits_is_one_line(run):
    code, out, err = run("generate", "x" * 500)
    assert (code, out) == (2, "")
    assert err.startswith("jpaged: error: prompt_token_ids has") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["generate", "--no-such-option"], ["nonsense"], ["generate", "--top-k=many"]]
)
def test_argument_that_there_is_not_ends_with_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert arguments[-1].split("=")[0] in capsys.readouterr().err


def test_help_and_mistakes_do_not_wait_for_jax_to_be_imported():
    script = (
        "import sys; from jpaged import cli; code = cli.main(['generate', 'Hi', '--top-p=2']); "
        "sys.exit(3 if 'jax' in sys.modules else code)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 2, process.stderr
    assert "top_p is 2.0" in process.stderr


def test_models_own_defaults_come_before_the_commands_and_after_what_is_given(
    tiny_model, tmp_path, capsys, monkeypatch
):
    for file in tiny_model("gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "generation_config.json"
    path.write_text('{"max_new_tokens": 3, "temperature": 0.5, "top_k": 4}')
    asked = []
    stream = LLM.stream

    def spy(llm, prompts, params, **options):
        asked.extend(params)
        return stream(llm, prompts, params, **options)

    monkeypatch.setattr(LLM, "stream", spy)
    command = ["generate", "Hi", "--raw", "--model", str(tmp_path), *ENGINE]
    for flags in ([], ["--top-k", "7", "--seed", "1"], ["-n", "2", "--min-p", "0.1"]):
        assert cli.main([*command, *flags]) == 0
    assert asked == [
        SamplingParams(max_tokens=3, temperature=0.5, top_k=4),
        SamplingParams(max_tokens=3, temperature=0.5, top_k=7, seed=1),
        SamplingParams(max_tokens=3, temperature=0.5, top_k=4, n=2, min_p=0.1),
    ]
    assert cli.main([*command, "--top-p", "0"]) == 2
    assert "top_p is 0.0" in capsys.readouterr().err


def test_several_answers_are_printed_below_their_prompt(tiny_model, capsys):
    command = ["generate", "Hi", "--raw", "--model", str(tiny_model("gqa")), *ENGINE]
    sampled = ["--temperature", "1", "--seed", "1", "--max-tokens", "4", "--ignore-eos"]
    assert cli.main([*command, *sampled, "-n", "3"]) == 0
    several = capsys.readouterr().out
    for seed in ("1", "2", "3"):
        assert cli.main([*command, *sampled, "--seed", seed]) == 0
        assert capsys.readouterr().out.rstrip("\n") in several
    assert several.startswith("> Hi\n")
    assert cli.main([*command, "-n", "2", "--temperature", "0"]) == 2
    assert "n is 2; it must be 1 at temperature 0" in capsys.readouterr().err
