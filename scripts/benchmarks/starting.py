"""How long it takes from the command to the first training step of a recipe, and to the end of --help.

The clock stops when the record of the first step is on disk, which is when the third step has begun. Cold is with no
compiled program and no tokenised data kept from before, warm with both.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from children import DEVNULL, PIPE, STDOUT, run, start

TRAIN = [sys.executable, "-m", "dseekjax.train"]


def seconds_to_help() -> float:
    began = time.perf_counter()
    run([*TRAIN, "--help"], check=True, stdout=DEVNULL)
    return time.perf_counter() - began


def seconds_to_first_step(model: str, folder: Path, name: str) -> float:
    """Starts a run that keeps what it can in `folder`, and ends it after its first record."""
    records = folder / name / "metrics.jsonl"
    keys = {
        "run.dir": folder / name,
        "run.compilation_cache_dir": folder / "programs",
        "data.cache_dir": folder / "data",
    }
    began = time.perf_counter()
    process = start(
        [*TRAIN, "--model", model, *(f"{key}={value}" for key, value in keys.items())],
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
    )
    while not (records.is_file() and records.read_text()):
        if process.poll() is not None:
            raise SystemExit(f"error: --model {model} cannot be timed, for it ended:\n{process.communicate()[0]}")
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="a shipped recipe; default quickstart")
    parser.add_argument("--rounds", type=int, default=3, help="of each; the median is printed; default 3")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} times nothing; make it 1 or more")
    found: dict[str, list[float]] = {"help": [], "cold": [], "warm": []}
    for _ in range(options.rounds):
        found["help"].append(seconds_to_help())
        with tempfile.TemporaryDirectory() as folder:
            found["cold"].append(seconds_to_first_step(options.model, Path(folder), "first"))
            found["warm"].append(seconds_to_first_step(options.model, Path(folder), "second"))
    for name, seconds in found.items():
        print(f"{name:5} {median(seconds):5.2f} s   ({', '.join(f'{each:.2f}' for each in seconds)})")
    if options.json:
        print(json.dumps({name: median(seconds) for name, seconds in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
