"""What can go wrong in a way that a user can mend."""


class UserError(Exception):
    """Something that the user gave is wrong; the message is one sentence with the field, the value and the fix.

    The doors print the message without a traceback and exit with `exit_code`.
    """

    exit_code = 2


class TrainingStoppedError(UserError):
    """Training itself cannot go on, although all that was given was well formed."""

    exit_code = 1
