"""The main door: `python -m dseekjax.train --config configs/quickstart.yaml`."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence

from dseekjax.config import Config, dump_config, load_config, recipe_path
from dseekjax.config_reference import format_reference
from dseekjax.door import command_name, exit_status
from dseekjax.errors import UserError


def command() -> int:
    """`main`, of a process that is there for nothing else: it may start again with a better allocator."""
    return main(may_restart=True)


def main(arguments: Sequence[str] | None = None, *, may_restart: bool = False) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 a mistake of the user, 128 + n stopped by signal n."""
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        options = _parse(given)
        config = _load(options)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        return _train(config, options, given, may_restart=may_restart)

    # The training loop, where something would be lost, has a handler of its own.
    return exit_status(run)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("train"),
        description="Trains a model. Run the same command again to resume a run that was stopped, by whatever.",
        epilog="keys, to be set in the config file or as KEY=VALUE:\n\n" + format_reference(Config),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; what it leaves out has its default")
    parser.add_argument("--model", metavar="NAME", help="a shipped recipe: --model gpt2_124m is configs/gpt2_124m.yaml")
    parser.add_argument("--batch-size", metavar="N", help="the same as train.global_batch_size=N")
    parser.add_argument("--fresh", action="store_true", help="start over; an existing run.dir is renamed, not deleted")
    parser.add_argument("--dry-run", action="store_true", help="build the program, print its summary and exit")
    parser.add_argument("--print-config", action="store_true", help="print the whole config as YAML and exit")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in train.steps=100")
    return parser.parse_intermixed_args(arguments)


def _load(options: argparse.Namespace) -> Config:
    if options.config and options.model:
        raise UserError(f"--config {options.config} and --model {options.model} are both given; keep one of them")
    if not options.config and not options.model:
        raise UserError("give --config FILE or --model NAME, as in --config configs/quickstart.yaml; see --help")
    path = recipe_path(options.model) if options.model else options.config
    overrides = list(options.overrides)
    if options.batch_size is not None:
        same = [override for override in overrides if override.startswith("train.global_batch_size=")]
        if same:
            raise UserError(f"--batch-size {options.batch_size} and {same[-1]} are both given; keep one of them")
        overrides.append(f"train.global_batch_size={options.batch_size}")
    return load_config(path, overrides)


def _train(config: Config, options: argparse.Namespace, arguments: Sequence[str], *, may_restart: bool) -> int:
    if may_restart and config.run.tune_cpu:
        from dseekjax.allocator import best_allocator, restart_with

        restart_with(best_allocator())
    # Loads JAX, which --help and a wrong config must not wait for.
    from dseekjax.run import dry_run, run

    if options.dry_run:
        dry_run(config)
        return 0
    data = "'data.sources=[{path: YOUR.txt}]' run.dir=runs/mine"
    next_commands = (
        f"{_again(arguments, f'train.steps={2 * config.train.steps}')}   # train on from here, to twice the steps",
        f"{_again(arguments, data)}   # your own text",
        f"tensorboard --logdir {config.run.dir}   # look at every metric, after `pip install tensorboard`",
    )
    return run(config, fresh=options.fresh, next_commands=next_commands)


def _again(arguments: Sequence[str], changes: str) -> str:
    """The command that the user gave, with some keys changed."""
    changed = re.findall(r"([\w.]+)=", changes)
    kept = [word for word in arguments if word != "--fresh" and word.partition("=")[0] not in changed]
    return " ".join([command_name("train"), *map(shlex.quote, kept), changes])


if __name__ == "__main__":
    sys.exit(command())
