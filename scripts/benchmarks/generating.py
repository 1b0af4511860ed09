"""How fast text is generated on this machine's CPU, next to `transformers` with the same weights.

Greedy, in float32, with prompts of 32 tokens. The two take turns, in processes of their own, as torch needs another
environment; each times whole texts, from tokens to tokens, after one that warms it up. The ratio is the median of
pairs. Both must write the same.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dseekjax.checkpoint.parameters import write_parameters
from dseekjax.config import dump_config, load_config, recipe_path
from dseekjax.conversion import export_run
from dseekjax.data.config import END_OF_DOCUMENT
from dseekjax.generation.complete import Writer
from dseekjax.generation.sampling import Sampling
from dseekjax.trained import open_trained
from dseekjax.training.program import build_program
from dseekjax.training.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
from children import PIPE, start

SMALL = (
    *("model.num_layers=6", "model.embed_dim=384", "model.attention.num_heads=6", "model.feed_forward.hidden_dim=1536"),
    *("model.vocabulary_size=8192", "model.max_positions=512", "data.sequence_length=512"),
)
MODELS: dict[str, tuple[str, ...]] = {"small": SMALL, "gpt2": ()}
PROMPT_LENGTH = 32


def make_run(folder: Path, overrides: tuple[str, ...]) -> None:
    """A run of random parameters, large enough that the next token is never a close call."""
    float32 = ("precision.compute_dtype=float32", "model.initializer_scale=0.1")
    config = load_config(recipe_path("gpt2_124m"), [*overrides, *float32, f"run.dir={folder}"])
    directory = RunDirectory(folder)
    folder.mkdir()
    params = build_program(config, jax.devices()).init().params
    write_parameters(directory.checkpoints, params, config.checkpoint, config.model_dump(mode="json"))
    # With as many words as the model has tokens: what the tokenizer does not have is not written.
    words = {END_OF_DOCUMENT: 0, **{f"w{i}": i for i in range(1, config.model.vocabulary_size)}}
    directory.tokenizer.write_text(Tokenizer(WordLevel(words, unk_token=END_OF_DOCUMENT)).to_str())
    directory.config.write_text(dump_config(config))


class Theirs:
    """The other process."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).parents[1] / "references" / "transformers_generating.py"
        self._process = start([python, script, folder], stdin=PIPE, stdout=PIPE, text=True)
        self.threads = self._answer()["threads"]

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def ours(writer: Writer, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each text."""
    began = time.perf_counter()
    texts = list(writer.complete(prompts, max_tokens=new_tokens, sampling=Sampling(0.0), batch_size=len(prompts)))
    return time.perf_counter() - began, [list(text.tokens) for text in texts]


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("scripts/benchmark_generate", description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), nargs="*", default=list(MODELS), help="sizes to time")
    parser.add_argument("--batch-size", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers-python", required=True, help="given by the script")
    given = parser.parse_args()
    table = Table("model", "batch", "tokens/s", "transformers", "ratio", "same tokens")
    for name in given.model:
        with tempfile.TemporaryDirectory() as folder:
            run, exported = Path(folder) / "run", Path(folder) / "exported"
            make_run(run, MODELS[name])
            export_run(run, exported)
            # Nothing ends a text before its time, here either.
            writer = Writer(dataclasses.replace(open_trained(run), end_token=-1))
            theirs = Theirs(given.transformers_python, exported)
            rng = np.random.default_rng(0)
            for size in given.batch_size:
                prompts = rng.integers(1, 256, (size, PROMPT_LENGTH)).tolist()
                seconds: list[tuple[float, float]] = []
                same = True
                for _ in track(range(given.rounds + 1), f"{name}, batch {size}", transient=True):
                    (mine, tokens), (other, expected) = (
                        ours(writer, prompts, given.new_tokens),
                        theirs(prompts, given.new_tokens),
                    )
                    same &= tokens == expected
                    seconds.append((mine, other))
                rates = [size * given.new_tokens / median(column) for column in zip(*seconds[1:], strict=True)]
                ratio = median(other / mine for mine, other in seconds[1:])
                table.add_row(name, str(size), *(f"{rate:.0f}" for rate in rates), f"{ratio:.2f}", str(same))
            theirs.close()
            del writer
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
