"""What can go wrong in a way that a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something that the user gave is wrong; the message is one sentence with the field, the value and the fix.

    The doors print the message without a traceback and exit with `exit_code`.
    """

    exit_code = 2


class TrainingStoppedError(UserError):
    """Training itself cannot go on, although all that was given was well formed."""

    exit_code = 1


@contextmanager
def about(field: str) -> Iterator[None]:
    """Puts the name of the field before what is wrong with its value."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
