"""The texts that a model is evaluated on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dseekjax.data.corpus import Portion
from dseekjax.data.preparation.pipeline import Watch
from dseekjax.data.reading.inputs import Format
from dseekjax.data.sources import Data, open_data, open_whole
from dseekjax.errors import UserError
from dseekjax.trained import Trained
from dseekjax.training.run_directory import RunDirectory

Tell = Callable[[str], None]


def given_texts(
    trained: Trained, paths: Sequence[str], file_format: Format, *, workers: int, tell: Tell, watch: Watch
) -> list[Portion]:
    """All of each path, in the tokens of a model; arguments and errors as of `open_whole`."""
    return [
        open_whole(
            path,
            file_format,
            tokenizer=trained.tokenizer,
            end_of_document=trained.tokenizer.id_to_token(trained.end_token) or "",
            cache_dir=trained.config.data.cache_dir,
            workers=workers,
            tell=tell,
            watch=watch,
        )
        for path in paths
    ]


def held_out_texts(trained: Trained, *, workers: int, tell: Tell, watch: Watch) -> tuple[Portion, ...]:
    """What a run holds out of its data; arguments as of `open_data`.

    Raises:
        UserError: it holds out nothing, or what its model read was other data; or as of `open_data`.
    """
    if trained.step == 0:
        raise UserError(
            f"{trained.path}: that run is at step 0 and has held out nothing of what its model read; give --data, or "
            "--tasks"
        )
    data = open_data(
        trained.config.data,
        model_vocabulary_size=trained.config.model.vocabulary_size,
        kept_tokenizer=RunDirectory(trained.path).tokenizer,
        workers=workers,
        tell=tell,
        watch=watch,
    )
    if not data.evaluation:
        raise UserError(f"{trained.path}: that run holds nothing out to evaluate; give --data, or --tasks")
    if not _is_as_trained(data, trained.data):
        raise UserError(
            f"{trained.path}: what is held out is not what it was in training: data.sources, data.evaluation_sources, "
            "or how they are split, changed, and the model may have read it; put back what it began with, or give "
            "--data"
        )
    return data.evaluation


def _is_as_trained(data: Data, saved: Mapping[str, Any]) -> bool:
    if "held_out" in saved:
        return list(data.held_out) == saved["held_out"]
    # An older checkpoint tells what was trained on, with how it was cut behind it; the rest was held out.
    trained_on = [identity.rpartition(":")[0] for identity in saved.get("identity", [])]
    return trained_on == [source.identity for source in data.training]
