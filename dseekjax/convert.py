"""The door to Hugging Face: `python -m dseekjax.convert --from-hf DIR --run OUT`, or `--run DIR --to-hf OUT`."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError
from dseekjax.files import discard_begun

if TYPE_CHECKING:
    from rich.console import Console

    from dseekjax.conversion import Watch

DESCRIPTION = """\
Makes a run of a Hugging Face checkpoint (GPT-2, Llama, Mistral, Qwen2), or a Hugging Face checkpoint of a run:

  --from-hf DIR --run OUT    OUT is a run at step 0, to start others from with train.initialize_from=OUT
  --run DIR --to-hf OUT      OUT holds config.json, safetensors files, the tokenizer and checksums

Of weights only safetensors files are read, each device its own slices. OUT appears when all is done, and must not be
there before."""

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_status(lambda: _convert(_parse(sys.argv[1:] if arguments is None else arguments)), _give_up)


def _give_up() -> str:
    """Nothing has its name before it is whole, and what has none yet is removed."""
    left = (f"\n{path} is left of it; the same command begins by emptying that" for path in discard_begun())
    return "interrupted" + "".join(left)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("convert"), description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--from-hf", metavar="DIR", help="folder with config.json, safetensors files and tokenizer.json")
    add("--run", metavar="DIR", required=True, help="folder of the run: made by --from-hf, read by --to-hf")
    add("--to-hf", metavar="OUT", help="folder to make")
    add("--dtype", choices=("float32", "bfloat16"), help="of the tensors of --to-hf; default float32, as in training")
    add("--shard-size", metavar="SIZE", help="largest file of --to-hf, as in 500MB; default 5GB")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of the run's config, as in mesh.tensor=8; "
        "python -m dseekjax.train --help lists them")  # fmt: skip
    options = parser.parse_intermixed_args(arguments)
    if (options.from_hf is None) == (options.to_hf is None):
        given = "neither" if options.from_hf is None else "both"
        raise UserError(f"of --from-hf DIR and --to-hf OUT {given} is given; give one of them; see --help")
    if options.from_hf is not None:
        for option, value in (("--dtype", options.dtype), ("--shard-size", options.shard_size)):
            if value is not None:
                raise UserError(f"{option} {value} is for --to-hf, and parameters of runs are float32; leave it out")
    return options


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?B?)", text.upper())
    size = int(float(found[1]) * UNITS.get(found[2], 0)) if found else 0
    if size <= 0:
        raise UserError(f"--shard-size {text} is no size; give one as in 500MB or 5GB")
    return size


def _convert(options: argparse.Namespace) -> int:
    shard_bytes = _bytes(options.shard_size or "5GB")
    # Loads JAX, which --help must not wait for.
    from rich.console import Console

    from dseekjax.conversion import export_run, import_run, is_first_process

    console = Console(soft_wrap=True, highlight=False, markup=False)
    run = Path(options.run).expanduser()
    with _progress(console) as watch:
        if options.from_hf is not None:
            source = Path(options.from_hf).expanduser()
            import_run(source, run, options.overrides, tell=console.print, watch=watch)
        else:
            export_run(
                run,
                Path(options.to_hf),
                options.overrides,
                dtype=options.dtype or "float32",
                shard_bytes=shard_bytes,
                tell=console.print,
                watch=watch,
            )
    if options.from_hf is not None and is_first_process():
        start = f"--config {shlex.quote(str(run / 'config.yaml'))} train.initialize_from={shlex.quote(str(run))}"
        data = "run.dir=runs/mine 'data.sources=[{path: YOUR.txt}]'"
        console.print(f"Next:\n  {command_name('convert').replace('convert', 'train')} {start} {data}")
    return 0


@contextmanager
def _progress(console: "Console") -> "Iterator[Watch]":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def watch(work: str, done: int, total: int) -> None:
            progress.update(task, description=work, completed=done, total=total)

        yield watch


if __name__ == "__main__":
    sys.exit(main())
