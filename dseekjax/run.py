"""One training run: data, Program, Trainer and hooks put together from a config."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

from dseekjax.checkpoint.hook import CheckpointHook, InitializeHook
from dseekjax.checkpoint.path import checkpoint_path
from dseekjax.checkpoint.quiet import silence_orbax
from dseekjax.checkpoint.store import latest_step
from dseekjax.config import Config, dump_config
from dseekjax.data.assembly import evaluation_batches, training_feed
from dseekjax.data.feed import TrainingFeed
from dseekjax.data.sources import Data, open_data
from dseekjax.data.tokenizers import learned_size, load_tokenizer
from dseekjax.errors import UserError, about
from dseekjax.imported import refuse_sliding_of_origin
from dseekjax.insight.metrics import MetricsHook, read_records
from dseekjax.insight.preparation import PreparationProgress
from dseekjax.insight.profile import ProfileHook
from dseekjax.insight.report import write_report
from dseekjax.insight.tensorboard import TensorBoardWriter
from dseekjax.insight.terminal import TerminalHook
from dseekjax.platform import available_cores
from dseekjax.start import start_jax
from dseekjax.training.evaluation import Evaluation, build_evaluation
from dseekjax.training.feed import rows_of_process
from dseekjax.training.hooks import Hook
from dseekjax.training.processes import on_first_process
from dseekjax.training.program import Program, build_program
from dseekjax.training.run_directory import KeepFilesHook, RunDirectory
from dseekjax.training.summary import summarise
from dseekjax.training.trainer import Trainer


def dry_run(config: Config) -> None:
    """Builds the Program and prints its summary; touches no file.

    Raises:
        UserError: the config does not fit the devices.
    """
    start_jax(config, keeps_programs=False)
    print(summarise(build_program(config, jax.devices())))


def run(config: Config, *, fresh: bool = False, next_commands: tuple[str, ...] = ()) -> int:
    """Trains, resuming what is in `run.dir`; returns 0, or 128 + n if signal n stopped it.

    Args:
        config: what to train.
        fresh: whether to start over, renaming an existing `run.dir`.
        next_commands: printed when training is complete.

    Raises:
        UserError: something in the config or in the files that it names is wrong.
    """
    silence_orbax()
    start_jax(config)
    console = Console(quiet=jax.process_index() > 0, soft_wrap=True)
    tell = functools.partial(console.print, highlight=False, markup=False)
    refuse_sliding_of_origin(RunDirectory(config.run.dir), config)
    program = build_program(config, jax.devices())
    directory = RunDirectory(config.run.dir)
    try:
        _claim(directory, config, fresh, tell)
        return _run(config, program, directory, console, tell, next_commands)
    finally:
        directory.release()


def _run(
    config: Config,
    program: Program,
    directory: RunDirectory,
    console: Console,
    tell: Callable[[str], None],
    next_commands: tuple[str, ...],
) -> int:
    summary = summarise(program)
    done = latest_step(directory.checkpoints)
    if done is None and directory.metrics.is_file():
        tell(f"No checkpoint of {directory.path} is there to go on from: its steps are done again from the first.")
    tell(summary)
    tell(f"run directory    {directory.path}")
    if not directory.tokenizer.is_file():
        _refuse_moved_tokenizer(config)
    with PreparationProgress(console) as watch:
        data = open_data(
            config.data,
            model_vocabulary_size=config.model.vocabulary_size,
            kept_tokenizer=directory.tokenizer if directory.config.is_file() else None,
            workers=available_cores(),
            tell=tell,
            watch=watch,
        )
    feed, evaluation = _feed(config, program, data, tell), _evaluation(config, program, data, tell)
    if done is None:
        _refuse_other_tokenizer(config, data)
        # Before anything is written down that the corrected command would stumble over.
        feed.refuse_too_few()
        for source, epochs in zip(config.data.sources, feed.epochs(), strict=True):
            if epochs is not None:
                tell(f"data             {source.path}, read {epochs:.3g} times by step {config.train.steps}")
    if evaluation is None:
        tell("Nothing is held out, so nothing will be evaluated; see data.held_out_fraction.")
    checkpoints = CheckpointHook(
        directory.checkpoints, config.checkpoint, program.state_shape, config.model_dump(mode="json"), tell
    )
    if done is not None and done >= config.train.steps:
        # What only looks like the last checkpoint is damaged, and then training goes on from one before.
        done = _newest_sound_step(checkpoints, feed)
    if done is not None and done >= config.train.steps:
        checkpoints.close()
        tell(f"{directory.path} is already at step {done}; raise train.steps to train on.")
        if jax.process_index() == 0 and not directory.report.is_file():
            _report(directory, config, summary)
        return 0
    trainer = Trainer(
        program,
        feed,
        evaluation=evaluation,
        hooks=[checkpoints, *_hooks(config, program, directory, data, console, tell)],
    )
    context = trainer.run()

    if jax.process_index() == 0:
        _report(directory, config, summary)
    if context.step < config.train.steps:
        tell(f"Stopped after step {context.step}, which is saved; run the same command again to go on.")
        return 128 + (trainer.stopped_by or signal.SIGTERM)
    tell(f"Done: {directory.report} shows what came of it.")
    if next_commands:
        tell("\nNext:\n" + "\n".join(f"  {command}" for command in next_commands))
    return 0


def _claim(directory: RunDirectory, config: Config, fresh: bool, tell: Callable[[str], None]) -> None:
    with about("run.dir"):
        checkpoint_path(directory.checkpoints)

    def claim() -> None:
        if fresh and (moved := directory.move_away()):
            tell(f"Moved {directory.path} to {moved}.")
        directory.acquire()
        directory.refuse_other_config(config)

    on_first_process(claim)


def _newest_sound_step(checkpoints: CheckpointHook, feed: TrainingFeed) -> int | None:
    found = checkpoints.newest_sound(feed.state(0))
    return None if found is None else found[0]


def _refuse_moved_tokenizer(config: Config) -> None:
    """The config of an import names its tokenizer where the import was made."""
    spec, began_with = config.data.tokenizer, config.train.initialize_from
    if spec in (None, "bytes") or learned_size(spec) is not None or began_with is None:
        return
    path = RunDirectory(began_with).tokenizer
    if path.is_file() and not Path(spec).expanduser().is_file():
        raise UserError(
            f"data.tokenizer {spec}: there is no such file; if it went with train.initialize_from {began_with}, set "
            f"data.tokenizer to {path}"
        )


def _refuse_other_tokenizer(config: Config, data: Data) -> None:
    """Parameters know tokens by their ids, so what goes on from them needs the same; it may have more besides."""
    if config.train.initialize_from is None:
        return
    path = RunDirectory(config.train.initialize_from).tokenizer
    if path.is_file() and not load_tokenizer(path).get_vocab().items() <= data.tokenizer.get_vocab().items():
        raise UserError(
            f"data.tokenizer {config.data.tokenizer or 'null'}: its tokens are not those that the model of "
            f"train.initialize_from {config.train.initialize_from} has learned; set data.tokenizer to {path}"
        )


def _feed(config: Config, program: Program, data: Data, tell: Callable[[str], None]) -> TrainingFeed:
    return training_feed(
        data,
        config.data,
        seed=config.run.seed,
        global_batch_size=config.train.global_batch_size,
        rows=rows_of_process(program.batch_shape),
        num_batches=config.train.steps,
        tell=tell,
    )


def _evaluation(config: Config, program: Program, data: Data, tell: Callable[[str], None]) -> Evaluation | None:
    if not data.evaluation:
        return None
    batches = evaluation_batches(
        data.evaluation,
        config.data,
        global_batch_size=config.train.global_batch_size,
        rows=rows_of_process(program.batch_shape),
        tell=tell,
    )
    num_bytes = sum(portion.num_bytes for portion in data.evaluation)
    num_tokens = sum(portion.num_counted for portion in data.evaluation)
    return build_evaluation(
        program, batches, bytes_per_token=num_bytes / num_tokens, max_batches=config.evaluation.max_batches
    )


def _hooks(
    config: Config,
    program: Program,
    directory: RunDirectory,
    data: Data,
    console: Console,
    tell: Callable[[str], None],
) -> list[Hook]:
    hooks: list[Hook] = []
    if config.train.initialize_from is not None:
        other = RunDirectory(config.train.initialize_from)
        model = config.model.model_dump(mode="json")
        hooks.append(InitializeHook(other.checkpoints, program.init, program.state_shape, model, tell))
    if jax.process_index() == 0:
        kept = {
            directory.tokenizer: data.tokenizer.to_str(),
            directory.end_of_document: data.end_of_document,
            directory.config: dump_config(config),
        }
        hooks.append(KeepFilesHook(kept))
        writers = [TensorBoardWriter(directory.tensorboard)] if config.insight.tensorboard else []
        hooks.append(MetricsHook(directory.metrics, writers, tell))
        hooks.append(TerminalHook(console, config.insight.print_every_steps))
    if config.run.profile_steps:
        hooks.append(ProfileHook(directory.profile, config.run.profile_steps))
    return hooks


def _report(directory: RunDirectory, config: Config, summary: str) -> None:
    write_report(
        list(read_records(directory.metrics)),
        title=f"{Path(config.run.dir).name}: {config.model.num_layers} layers of width {config.model.embed_dim}",
        summary=summary,
        config=dump_config(config),
        plot=directory.loss_plot,
        page=directory.report,
    )
