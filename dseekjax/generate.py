"""Continues texts with a trained model: `python -m dseekjax.generate --run runs/quickstart --prompt 'Emma was'`."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError

if TYPE_CHECKING:
    from dseekjax.generation.complete import Completion, Writer
    from dseekjax.generation.sampling import Sampling

DESCRIPTION = """\
Continues texts with the newest checkpoint of a run, which may still be training. The same seed gives the same texts,
whatever other prompts are beside them. A text ends where the model ends its document, at a --stop, after --max-tokens,
or when the model's context is full."""

EPILOG = """\
KEY=VALUE changes the run's config for this time: mesh.tensor=2 for other devices than it was trained on,
precision.compute_dtype=bfloat16 for speed, data.sequence_length=N for longer texts of a model with rotary positions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_status(lambda: _generate(_parse(sys.argv[1:] if arguments is None else arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("generate"),
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", metavar="DIR", required=True, help="folder of the run, its run.dir")
    add("--prompt", metavar="TEXT", action="append", default=[], help="what to continue; may be given again")
    add("--prompts", metavar="FILE", help='a prompt per line, or {"prompt": ...} per line of a .jsonl; - is standard '
        "input, answered line by line")  # fmt: skip
    add("--max-tokens", metavar="N", default="128", help="most tokens to write; default %(default)s")
    add("--temperature", metavar="T", type=float, default=1.0, help="below 1 keeps to what is likely, 0 takes the most "
        "likely token; default %(default)s")  # fmt: skip
    add("--top-k", metavar="K", help="draw from the K most likely tokens")
    add("--top-p", metavar="P", type=float, help="draw from the fewest tokens of probability P together")
    add("--seed", metavar="S", type=int, default=0, help="default %(default)s")
    add("--stop", metavar="TEXT", action="append", default=[], help="ends the text, and is no part of it; may be given "
        "again")  # fmt: skip
    add("--batch-size", metavar="B", default="8", help="prompts at a time; default %(default)s")
    add("--json", action="store_true", help="print an object per prompt: prompt, text, tokens, finish_reason")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as in mesh.tensor=2; a lone - is --prompts -")
    options = parser.parse_intermixed_args(arguments)
    if "-" in options.overrides:
        options.overrides = [override for override in options.overrides if override != "-"]
        options.prompts = options.prompts or "-"
    if bool(options.prompt) == (options.prompts is not None):
        raise UserError("give --prompt TEXT, or --prompts FILE, where - is standard input; one of the two")
    for option in ("max_tokens", "top_k", "batch_size"):
        setattr(options, option, _whole_number(getattr(options, option), f"--{option.replace('_', '-')}"))
    return options


def _whole_number(text: str | None, option: str) -> int | None:
    if text is not None and not (text.isdecimal() and 0 < int(text) < 2**31):
        raise UserError(f"{option} {text} is no whole number from 1 up; give one")
    return None if text is None else int(text)


def _generate(options: argparse.Namespace) -> int:
    prompts = list(options.prompt)
    if options.prompts == "-" and sys.stdin is None:
        raise UserError("--prompts -: standard input is closed; give --prompt TEXT or --prompts FILE")
    if options.prompts not in (None, "-"):
        prompts = _read_prompts(Path(options.prompts).expanduser())
    # Loads JAX, which --help and a wrong file must not wait for.
    import jax

    from dseekjax.generation.complete import Writer
    from dseekjax.generation.sampling import Sampling
    from dseekjax.trained import open_trained

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    writer = Writer(open_trained(options.run, options.overrides, tell=lambda told: print(told, file=sys.stderr)))
    if jax.process_index() > 0:
        # Of several processes, which all compute, one prints.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if options.prompts != "-":
        _answer(options, writer, sampling, prompts, 0)
        return 0
    status = 0
    for number, line in enumerate(sys.stdin):
        try:
            if prompt := line.rstrip("\n"):
                _answer(options, writer, sampling, [prompt], number)
        except UserError as error:
            # The next line may be better.
            print(f"error: {error}", file=sys.stderr)
            status = error.exit_code
    return status


def _read_prompts(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.rstrip("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"--prompts {path}: cannot be read ({reason}); give a text file with a prompt per line"
        ) from error
    prompts = list(_of_json(path, lines)) if path.suffix == ".jsonl" else [line for line in lines if line]
    if not prompts:
        raise UserError(f"--prompts {path}: is empty; give a prompt per line")
    return prompts


def _of_json(path: Path, lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'--prompts {path}: line {number} is not of the form {{"prompt": "..."}}; mend it')
        yield prompt


def _answer(
    options: argparse.Namespace, writer: "Writer", sampling: "Sampling", prompts: list[str], first: int
) -> None:
    """Prints what a model writes: one text as it comes, several each when it is done."""
    streams = len(prompts) == 1 and not options.json

    def stream(number: int, piece: str) -> None:
        print(piece, end="", flush=True)

    completions = writer.complete(
        prompts,
        max_tokens=options.max_tokens,
        sampling=sampling,
        stop=options.stop,
        batch_size=options.batch_size,
        first=first,
        on_text=stream if streams else lambda number, piece: None,
    )
    if streams:
        print(prompts[0], end="", flush=True)
    for completion in completions:
        _print(options, completion, streams=streams)


def _print(options: argparse.Namespace, completion: "Completion", *, streams: bool) -> None:
    if options.json:
        print(json.dumps(completion.__dict__, ensure_ascii=False), flush=True)
    elif streams:
        print()
    else:
        print(f"{completion.prompt}{completion.text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
