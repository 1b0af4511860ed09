"""How fast batches come from a prepared corpus, next to other ways of reading the same tokens on this machine.

Everything is read shuffled: records of the length given, from shards of 128 MB that the machine has in memory. Ours
also makes targets, loss weights, segments and positions; what the others make is said beside them. `datasets` and
`webdataset` take part where they are installed: pip install datasets webdataset. At the end the quickstart is trained,
which takes a minute or two, to see how long it waits for data.
"""

import argparse
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dseekjax.data.assembly import training_feed
from dseekjax.data.config import END_OF_DOCUMENT, DataConfig
from dseekjax.data.corpus import Corpus, open_corpus
from dseekjax.data.held_out import hold_out
from dseekjax.data.manifest import (
    DOCUMENT_BYTES,
    DOCUMENT_ENDS,
    TOKENIZER,
    File,
    LeftOut,
    Manifest,
    hash_file,
    shard_name,
    write_manifest,
)
from dseekjax.data.preparation.shards import SHARD_BYTES
from dseekjax.data.sources import Data
from dseekjax.data.tokenizers import bytes_tokenizer, fingerprint
from dseekjax.insight.metrics import read_records

sys.path.insert(0, str(Path(__file__).parent))
from children import DEVNULL, run

SHARDS = 2
TOKENS_PER_BATCH = 1 << 16
MEAN_DOCUMENT = 900


def make_corpus(folder: Path) -> Corpus:
    """A corpus of random tokens in documents of log-normal lengths, as text from the web has."""
    rng = np.random.default_rng(0)
    per_shard = SHARD_BYTES // 2
    total = SHARDS * per_shard
    for number in range(SHARDS):
        rng.integers(0, 257, per_shard, np.uint16).tofile(folder / shard_name(number))
    lengths = rng.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, 2 * total // MEAN_DOCUMENT).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < total - 1], total)
    ends.tofile(folder / DOCUMENT_ENDS)
    np.diff(ends, prepend=0).tofile(folder / DOCUMENT_BYTES)
    tokenizer = bytes_tokenizer("<|endoftext|>")
    (folder / TOKENIZER).write_text(tokenizer.to_str())
    names = [*map(shard_name, range(SHARDS)), DOCUMENT_ENDS, DOCUMENT_BYTES, TOKENIZER]
    write_manifest(
        folder,
        Manifest(
            dtype="uint16",
            num_tokens=total,
            num_documents=len(ends),
            num_bytes=total,
            tokens_per_shard=per_shard,
            end_of_document="<|endoftext|>",
            end_token=256,
            tokenizer=fingerprint(tokenizer),
            made_from="random numbers",
            num_inputs=0,
            input_bytes=0,
            left_out=LeftOut(),
            files={name: File.of(folder / name, hash_file(folder / name)) for name in names},
        ),
    )
    return open_corpus(folder)


def ours(corpus: Corpus, length: int, packing: str) -> Iterator[Any]:
    config = DataConfig(sequence_length=length, packing=packing)
    data = Data(corpus.tokenizer, END_OF_DOCUMENT, (hold_out(corpus, 0.0)[0],), (), ())
    batch = TOKENS_PER_BATCH // length
    feed = training_feed(data, config, seed=0, global_batch_size=batch, rows=np.arange(batch), num_batches=1 << 30)
    return feed.start(feed.state(0))


def plain_numpy(corpus: Corpus, length: int) -> Iterator[Any]:
    """Fancy indexing of one shard: tokens and targets, and nothing else."""
    shard, batch = corpus.tokens.shards[0], TOKENS_PER_BATCH // length
    order = np.random.default_rng(0).permutation((len(shard) - 1) // length)
    columns = np.arange(length + 1)
    while True:
        for start in range(0, len(order) - batch, batch):
            tokens = shard[order[start : start + batch, None] * length + columns].astype(np.int32)
            yield tokens[:, :-1], tokens[:, 1:]


def hugging_face(corpus: Corpus, length: int, folder: Path) -> Iterator[Any]:
    """Arrow on disk, shuffled, with a collator that makes tokens and targets of it."""
    import datasets

    datasets.disable_progress_bars()
    batch = TOKENS_PER_BATCH // length
    rows = corpus.tokens.shards[0][: 1 << 24].astype(np.int32).reshape(-1, length)
    path = folder / f"arrow-{length}"
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(path))
    dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    while True:
        for rows in dataset.shuffle(seed=0).iter(batch_size=batch, drop_last_batch=True):
            tokens = np.asarray(rows["input_ids"])
            yield tokens, np.roll(tokens, -1, axis=1)


def web_dataset(corpus: Corpus, length: int, folder: Path) -> Iterator[Any]:
    """A tar of one .npy to a record, read in order with a buffer to shuffle, collated to tokens and targets."""
    import webdataset

    batch = TOKENS_PER_BATCH // length
    rows = corpus.tokens.shards[0][: 1 << 23].reshape(-1, length)
    path = folder / f"web-{length}.tar"
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            content = BytesIO()
            np.save(content, row)
            member = tarfile.TarInfo(f"{number:08}.npy")
            member.size = content.tell()
            content.seek(0)
            tar.addfile(member, content)
    dataset = webdataset.WebDataset(str(path), shardshuffle=False).shuffle(1000).decode().to_tuple("npy")
    while True:
        for rows in dataset.batched(batch, partial=False):
            tokens = np.asarray(rows[0]).astype(np.int32)
            yield tokens, np.roll(tokens, -1, axis=1)


def waiting_share(folder: Path) -> float:
    """Share of its time that training the quickstart spends on getting a batch and placing it on the device."""
    command = [sys.executable, "-m", "dseekjax.train", "--model", "quickstart", f"run.dir={folder / 'run'}"]
    run(command, check=True, stdout=DEVNULL)
    records = list(read_records(folder / "run" / "metrics.jsonl"))
    waited, taken = (sum(record[name] or 0 for record in records) for name in ("data_wait_seconds", "step_seconds"))
    return waited / taken


def million_tokens_per_second(batches: Iterator[Any], seconds: float) -> float:
    for _ in range(3):
        next(batches)
    count, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        next(batches)
        count += 1
    return count * TOKENS_PER_BATCH / (now - started) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement; default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        corpus = make_corpus(folder / "corpus")
        for length in (512, 2048):
            found: dict[str, Iterator[Any]] = {
                "ours, concatenate": ours(corpus, length, "concatenate"),
                "ours, first_fit": ours(corpus, length, "first_fit"),
                "numpy, fancy indexing": plain_numpy(corpus, length),
            }
            for label, make in {"datasets": hugging_face, "webdataset": web_dataset}.items():
                try:
                    batches = make(corpus, length, folder)
                    next(batches)
                except ImportError:
                    continue
                found[label] = batches
            rates: dict[str, list[float]] = {label: [] for label in found}
            for _ in range(options.rounds):
                for label, batches in found.items():
                    rates[label].append(million_tokens_per_second(batches, options.seconds))
            results[str(length)] = {label: median(them) for label, them in rates.items()}
        waiting = waiting_share(folder)
    table = Table("sequence length", "reader", "Mtok/s", "ours (concatenate) to it")
    for length, by_label in results.items():
        for label, rate in by_label.items():
            table.add_row(length, label, f"{rate:.1f}", f"{by_label['ours, concatenate'] / rate:.2f}")
    Console().print(table)
    print(f"training the quickstart waits for data for {waiting:.2%} of its time")
    if options.json:
        print(json.dumps({**results, "data_wait_share": waiting}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
