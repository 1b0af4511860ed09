"""Tokenizers, all through the `tokenizers` library: raw bytes, one trained on the spot, or one from a file."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dseekjax.errors import UserError

TOKENIZER_CONFIG = "tokenizer_config.json"
"""What tokenizers of Hugging Face have beside their tokenizer.json."""


def learned_size(spec: str) -> int | None:
    """N of `train:N`; None if a tokenizer is named that is there already."""
    return int(spec.removeprefix("train:")) if spec.startswith("train:") else None


def ready_tokenizer(spec: str, end_of_document: str) -> tokenizers.Tokenizer:
    """The tokenizer of bytes, or that in the tokenizer.json of this path.

    Raises:
        UserError: there is no such file, or it is no tokenizer.
    """
    return bytes_tokenizer(end_of_document) if spec == "bytes" else load_tokenizer(Path(spec).expanduser())


def bytes_tokenizer(end_of_document: str) -> tokenizers.Tokenizer:
    """One token per UTF-8 byte, and the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    return _byte_level(tokenizer, end_of_document)


def train_tokenizer(documents: Iterable[str], vocabulary_size: int, end_of_document: str) -> tokenizers.Tokenizer:
    """A byte-level byte-pair vocabulary (Sennrich et al. 2016, arXiv:1508.07909) learned from `documents`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return _byte_level(tokenizer, end_of_document)


def _byte_level(tokenizer: tokenizers.Tokenizer, end_of_document: str) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not end_of_document or tokenizer.token_to_id(end_of_document) is not None:
        raise UserError(f"{end_of_document!r} cannot end documents: it is text; give a word as <|endoftext|>")
    tokenizer.add_special_tokens([end_of_document])
    return tokenizer


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer from its tokenizer.json.

    Raises:
        UserError: the file is missing, cannot be read or is no tokenizer.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}; give bytes, train:N or the path of a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); make it readable, or give another") from error
    except Exception as error:
        raise UserError(f"{path} is not a tokenizer.json ({error})") from error
    # Some are shipped so that they cut texts off at the length that their model took.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_document_id(tokenizer: tokenizers.Tokenizer, end_of_document: str) -> int:
    """The id of the token put after each document.

    Raises:
        UserError: the tokenizer has no such token.
    """
    token = tokenizer.token_to_id(end_of_document)
    if token is None:
        special = sorted(added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special)
        raise UserError(
            f"the tokenizer has no token {end_of_document!r} to end documents with; its special tokens are {special}"
        )
    return token


def fingerprint(tokenizer: tokenizers.Tokenizer) -> str:
    """A hash of all that a tokenizer does."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def vocabulary_size(tokenizer: tokenizers.Tokenizer) -> int:
    """Rows that an embedding needs: not the number of tokens, for ids may leave gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def special_token(setting: Any) -> str:
    """A token of tokenizer_config.json: written as a string, or as an object that tells more of it; "" if neither."""
    content = setting.get("content") if isinstance(setting, dict) else setting
    return content if isinstance(content, str) else ""
