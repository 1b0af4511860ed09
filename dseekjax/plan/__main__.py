"""The planner's door: `python -m dseekjax.plan compile --model llama3_8b --cluster h100_sxm --hosts 8`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dseekjax.config import Config, load_config, recipe_path
from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError
from dseekjax.plan.cluster import cluster_names
from dseekjax.plan.compile import CompilerError, compile_report
from dseekjax.plan.render import print_report
from dseekjax.plan.report import CollectiveRow, Report

DOES_NOT_FIT = 3
PIPED_WIDTH = 100

DESCRIPTION = """\
Compiles the train step of a config for GPUs that are not there, and reports what XLA made of it: memory, collectives,
their overlap with computation, FLOPs and kernels. It needs no GPU, and takes from ten seconds to some minutes.

Exit status: 0 it fits, 3 it compiles but does not fit, 2 a mistake of the user, 1 the compiler failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return exit_status(lambda: _plan(_parse(sys.argv[1:] if arguments is None else arguments)))


def _plan(options: argparse.Namespace) -> int:
    program, config = _load(options)
    try:
        report = _compile(options, program, config)
    except CompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(report.model_dump_json(indent=2), flush=True)
    else:
        print_report(report, Console(soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH))
    return 0 if report.fits else DOES_NOT_FIT


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("plan"),
        description="Tells what a config needs on a cluster.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "compile",
        help="compile it for the cluster and report memory, collectives and cost",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="fields of --json, bytes and FLOPs per GPU and step:\n\n" + _schema(),
    )
    command.add_argument("--config", metavar="FILE", help="YAML file, as for training")
    command.add_argument("--model", metavar="NAME", help="a shipped recipe, as in --model llama3_8b")
    command.add_argument(
        "--cluster", metavar="K", required=True, help=f"{', '.join(cluster_names())}, or the path of a YAML file"
    )
    command.add_argument("--hosts", metavar="N", help="number of hosts; else what the cluster's file says")
    command.add_argument("--mesh", metavar="AXIS=N,…", help="as in fsdp=128,tensor=8; the same as mesh.fsdp=128 …")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--hlo", metavar="FILE", help="keep the compiled HLO text")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in train.global_batch_size=512")
    # Options of a subcommand may stand among its overrides only if both are parsed at once.
    options, rest = parser.parse_known_args(arguments)
    misplaced = [word for word in rest if word.startswith("-")]
    if misplaced:
        raise UserError(f"there is no option {misplaced[0]}; see {command_name('plan')} compile --help")
    options.overrides = [*options.overrides, *rest]
    return options


def _load(options: argparse.Namespace) -> tuple[str, Config]:
    if options.config and options.model:
        raise UserError(f"--config {options.config} and --model {options.model} are both given; keep one of them")
    if not options.config and not options.model:
        raise UserError("give --config FILE or --model NAME, as in --model llama3_8b; see --help")
    path = recipe_path(options.model) if options.model else options.config
    return options.model or options.config, load_config(path, [*_mesh(options.mesh), *options.overrides])


def _mesh(sizes: str | None) -> list[str]:
    parts = [] if sizes is None else [part.strip() for part in sizes.split(",")]
    names = [part.partition("=")[0] for part in parts]
    for part, name in zip(parts, names, strict=True):
        if not re.fullmatch(r"\w+=-?\d+", part, re.ASCII):
            raise UserError(f"--mesh {sizes}: {part!r} is not of the form AXIS=SIZE; write it as in fsdp=8,tensor=4")
        if names.count(name) > 1:
            raise UserError(f"--mesh {sizes}: {name} is there twice; give each axis one size")
    return [f"mesh.{part}" for part in parts]


def _compile(options: argparse.Namespace, program: str, config: Config) -> Report:
    if options.hosts is not None and not options.hosts.isdecimal():
        raise UserError(f"--hosts {options.hosts} is no number of hosts; give 1 or more")
    if options.hlo is not None and options.hlo.endswith(os.sep):
        raise UserError(f"--hlo {options.hlo} is the name of a directory; give the path of a file")
    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(stage: str) -> None:
            status.update(stage)
            if not console.is_terminal:
                print(f"{stage} …", file=sys.stderr)

        return compile_report(
            config,
            options.cluster,
            int(options.hosts) if options.hosts is not None else None,
            program=program,
            hlo=Path(options.hlo) if options.hlo else None,
            tell=tell,
        )


def _schema() -> str:
    fields = {name: field.description for name, field in Report.model_fields.items()}
    fields |= {f"collectives[].{name}": field.description for name, field in CollectiveRow.model_fields.items()}
    return "\n".join(f"  {name}\n      {meaning}" for name, meaning in fields.items())


if __name__ == "__main__":
    sys.exit(main())
