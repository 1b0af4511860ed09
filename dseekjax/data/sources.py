"""The sources that the data config names, opened, after tokenising what was not tokenised before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from dseekjax.data.config import END_OF_DOCUMENT, ChatConfig, CompletionConfig, DataConfig, SourceConfig
from dseekjax.data.corpus import Corpus, Portion, open_corpus
from dseekjax.data.held_out import describe, hold_out
from dseekjax.data.preparation.learning import sample
from dseekjax.data.preparation.pipeline import Recipe, Watch, prepare_corpus
from dseekjax.data.reading.chat import load_template
from dseekjax.data.reading.inputs import Format, Input, find_inputs
from dseekjax.data.reading.rows import ChatRow, CompletionRow
from dseekjax.data.streaming import Stream
from dseekjax.data.tokenizers import (
    end_of_document_id,
    fingerprint,
    learned_size,
    load_tokenizer,
    ready_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from dseekjax.errors import UserError, about

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """All that batches are made of."""

    tokenizer: tokenizers.Tokenizer
    end_of_document: str
    """The token after each document."""
    training: tuple[Portion | Stream, ...]
    """One per source, in the config's order."""
    evaluation: tuple[Portion, ...]
    """One per source of a weight that has something held out, or per evaluation source."""
    held_out: tuple[str, ...]
    """Identities of all that is held out, also of sources of no weight, or of the evaluation sources."""


@dataclass(frozen=True)
class _Files:
    """A source that is not prepared."""

    inputs: tuple[Input, ...]
    format: Format


def open_data(
    config: DataConfig,
    *,
    model_vocabulary_size: int,
    kept_tokenizer: Path | None = None,
    workers: int = 1,
    tell: Tell = lambda sentence: None,
    watch: Watch = lambda progress: None,
) -> Data:
    """Opens every source, after tokenising those that are files into the cache.

    Args:
        config: the sources and the tokenizer.
        model_vocabulary_size: rows of the model's embedding.
        kept_tokenizer: the tokenizer.json of an earlier start of the same run; used where the file exists, so that a
            resumed run keeps the very tokenizer that it began with.
        workers: processes that tokenise; see `prepare_corpus`.
        tell: called with sentences for the user before something that may take long.
        watch: called while files are tokenised.

    Raises:
        UserError: a source cannot be read, or the tokenizer does not fit the model or the sources.
    """
    named = {f"data.sources.{i}": source for i, source in enumerate(config.sources)}
    for_evaluation = {f"data.evaluation_sources.{i}": source for i, source in enumerate(config.evaluation_sources)}
    folders = {label: source for label, source in (named | for_evaluation).items() if _is_folder(source)}
    prepared = {label: _open(source, label) for label, source in folders.items()}
    end_of_document = _end_of_document(config, prepared)

    def find(sources: dict[str, SourceConfig]) -> dict[str, Corpus | _Files]:
        return {label: prepared.get(label) or _find(it, label, end_of_document) for label, it in sources.items()}

    found, evaluation = find(named), find(for_evaluation)
    tokenizer = _tokenizer(config, found, prepared, end_of_document, kept_tokenizer)
    needed = vocabulary_size(tokenizer)
    if needed > model_vocabulary_size:
        raise UserError(
            f"model.vocabulary_size {model_vocabulary_size} is smaller than the tokenizer's {needed} tokens; set it to "
            f"at least {needed}"
        )
    with about("data.end_of_document"):
        end_token = end_of_document_id(tokenizer, end_of_document)

    def corpus(label: str, source: Corpus | _Files) -> Corpus:
        if isinstance(source, Corpus):
            return source
        key = fingerprint(tokenizer)
        recipe = Recipe(source.inputs, source.format, end_of_document, key, lambda: tokenizer)
        with about(label):
            return open_corpus(_cached(config.cache_dir, recipe, workers, tell, watch))

    training: list[Portion | Stream] = []
    held_out: list[tuple[Portion, float]] = []
    for source, (label, opened) in zip(config.sources, found.items(), strict=True):
        if source.streaming and isinstance(opened, _Files):
            training.append(Stream(opened.inputs, opened.format, tokenizer, end_token, tell))
            continue
        fraction = 0.0 if evaluation else config.held_out_fraction
        kept, rest = hold_out(corpus(label, opened), fraction, label)
        training.append(kept)
        if rest is not None:
            held_out.append((rest, source.weight))
            for sentence in describe(label, kept, rest) if source.weight else ():
                tell(sentence)
    if evaluation:
        held_out = [(hold_out(corpus(label, opened), 0.0, label)[0], 1.0) for label, opened in evaluation.items()]
    return Data(
        tokenizer,
        end_of_document,
        tuple(training),
        evaluation=tuple(portion for portion, weight in held_out if weight),
        held_out=tuple(portion.identity for portion, _ in held_out),
    )


def open_whole(
    path: str,
    format: Format,
    *,
    tokenizer: tokenizers.Tokenizer,
    end_of_document: str,
    cache_dir: str,
    workers: int = 1,
    tell: Tell = lambda sentence: None,
    watch: Watch = lambda progress: None,
) -> Portion:
    """All of a source that no config names, in the tokens of a model.

    Args:
        path: as of a source.
        format: of its files, where it is no folder.
        tokenizer: of the model.
        end_of_document: the token that it knows after each document.
        cache_dir: where files are kept tokenised.
        workers: processes that tokenise; see `prepare_corpus`.
        tell: called with sentences for the user before something that may take long.
        watch: called while files are tokenised.

    Raises:
        UserError: it cannot be read, or was prepared with another tokenizer.
    """
    key, folder = fingerprint(tokenizer), Path(path).expanduser()
    if not folder.is_dir():
        recipe = Recipe(find_inputs([path]), format, end_of_document, key, lambda: tokenizer)
        return hold_out(open_corpus(_cached(cache_dir, recipe, workers, tell, watch)), 0.0, path)[0]
    corpus = open_corpus(folder)
    if corpus.manifest.tokenizer != key:
        raise UserError(
            f"{path} was prepared with another tokenizer than the run's; prepare it with the tokenizer.json in the "
            "folder of the run"
        )
    if corpus.manifest.end_of_document != end_of_document:
        raise UserError(
            f"{path} ends documents with {corpus.manifest.end_of_document!r}, and the run with {end_of_document!r}; "
            "prepare it with the same --end-of-document"
        )
    return hold_out(corpus, 0.0, path)[0]


def example_row(config: CompletionConfig | ChatConfig, end_of_document: str) -> CompletionRow | ChatRow:
    """How a row becomes an example, as the config says.

    Raises:
        UserError: there is no such chat template, or what is the assistant's cannot be told from what it writes.
    """
    if isinstance(config, CompletionConfig):
        return CompletionRow(config.prompt_field, config.completion_field)
    return ChatRow(config.messages_field, load_template(config.template, end_of_document))


def _is_folder(source: SourceConfig) -> bool:
    return Path(source.path).expanduser().is_dir()


def _open(source: SourceConfig, label: str) -> Corpus:
    for field in ("document_separator", "streaming", "text_field", "format"):
        if getattr(source, field) != SourceConfig.model_fields[field].default:
            raise UserError(f"{label}.{field} is for files, and {source.path} is a folder; leave it out")
    with about(f"{label}.path"):
        return open_corpus(Path(source.path).expanduser())


def _find(source: SourceConfig, label: str, end_of_document: str) -> _Files:
    with about(f"{label}.path"):
        inputs = find_inputs([source.path])
    example = None
    if source.format is not None:
        with about(f"{label}.format"):
            example = example_row(source.format, end_of_document)
    format = Format(source.text_field, source.document_separator, example=example)
    with about(label):
        format.refuse_unused(inputs)
    return _Files(inputs, format)


def _cached(cache_dir: str, recipe: Recipe, workers: int, tell: Tell, watch: Watch) -> Path:
    folder = Path(cache_dir).expanduser().absolute() / "corpora"
    path = folder / recipe.fingerprint[:32]
    if not path.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write {folder} ({error.strerror}); make room or choose another"
            ) from error
        size = sum(file.size for file in recipe.inputs)
        tell(f"Tokenising {size / 1e6:,.1f} MB in {len(recipe.inputs):,} files into {path}.")
    manifest = prepare_corpus(recipe, path, workers=workers, watch=watch, wait=True)
    left_out = manifest.left_out
    if left_out.num_malformed:
        tell(f"Left out {left_out.num_malformed:,} lines that are no document, the first: {left_out.examples[0]}.")
    return path


def _end_of_document(config: DataConfig, prepared: dict[str, Corpus]) -> str:
    wanted = config.end_of_document
    for label, corpus in prepared.items():
        wanted = wanted or corpus.manifest.end_of_document
        if corpus.manifest.end_of_document != wanted:
            raise UserError(
                f"{label} ends documents with {corpus.manifest.end_of_document!r}, and data.end_of_document or another "
                f"source with {wanted!r}; prepare all with the same"
            )
    return wanted or END_OF_DOCUMENT


def _tokenizer(
    config: DataConfig,
    training: dict[str, Corpus | _Files],
    prepared: dict[str, Corpus],
    end_of_document: str,
    kept: Path | None,
) -> tokenizers.Tokenizer:
    if kept is not None and kept.is_file():
        try:
            tokenizer = load_tokenizer(kept)
        except UserError as error:
            raise UserError(f"run.dir: {kept} is damaged; remove it, and it will be made anew") from error
        named = "the tokenizer that this run began with"
    elif config.tokenizer is None and prepared:
        named, first = next(iter(prepared.items()))
        tokenizer = first.tokenizer
    else:
        spec = config.tokenizer or "bytes"
        named, size = f"data.tokenizer {spec}", learned_size(spec)
        if size is None:
            with about("data.tokenizer"):
                tokenizer = ready_tokenizer(spec, end_of_document)
        elif prepared:
            raise UserError(
                f"data.tokenizer {spec}: {next(iter(prepared))} has its tokenizer already; set data.tokenizer to null"
            )
        else:
            held_out = 0.0 if config.evaluation_sources else config.held_out_fraction
            tokenizer = train_tokenizer(_documents(training, held_out), size, end_of_document)
    for label, corpus in prepared.items():
        if corpus.manifest.tokenizer != fingerprint(tokenizer):
            fix = "prepare it with the same" + ("" if config.tokenizer is None else ", or set data.tokenizer to null")
            raise UserError(f"{label} was prepared with another tokenizer than {named}; {fix}")
    return tokenizer


def _documents(training: dict[str, Corpus | _Files], held_out_fraction: float) -> Iterator[str]:
    for label, source in training.items():
        if isinstance(source, _Files):
            with about(label):
                yield from sample(source.inputs, source.format, held_out_fraction)
