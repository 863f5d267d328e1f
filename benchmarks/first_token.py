"""Times `jpaged generate` from the start of the process to the first text and to the end.

    python -m benchmarks.first_token [--model smollm2] [--repeat 5] [--cold]

Prints one line of JSON, last. Programs come from the persistent cache, as in every run but the
first on a machine; `--cold` takes an empty cache instead, with the fetched models in it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jpaged.checkpoint.hub import cache_home


def measure(model: str, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first text and to the end of one process."""
    command = [sys.executable, "-m", "jpaged.cli", "generate", "--model", model]
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, "What is the capital of France?"], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - started
        text += process.stdout.read()
    if process.returncode or not text.strip():
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return first, time.perf_counter() - started


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="as for jpaged.LLM")
    parser.add_argument("--repeat", type=int, default=5, help="processes to start")
    parser.add_argument("--cold", action="store_true", help="start each with an empty cache")
    args = parser.parse_args()
    environment = dict(os.environ)
    if not args.cold:
        measure(args.model, environment)
    times = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as folder:
            if args.cold:
                environment["XDG_CACHE_HOME"] = folder
                (Path(folder) / "jpaged").mkdir()
                models = cache_home() / "models"
                if models.exists():  # fetching is not what is measured
                    (Path(folder) / "jpaged" / "models").symlink_to(models)
            times.append(measure(args.model, environment))
    first, whole = zip(*times, strict=True)
    print(
        json.dumps(
            {
                "model": args.model,
                "cold": args.cold,
                "first_token_s": round(statistics.median(first), 2),
                "first_token_s_all": [round(seconds, 2) for seconds in first],
                "whole_s": round(statistics.median(whole), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
