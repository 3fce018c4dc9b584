"""The one error for what a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the input, the configuration or the files, with its cure in the message.

    The message reads `<name> must <rule>: got <values>. <what to change>.` The command line prints
    it without a traceback and exits with code 2; every other exception is a defect of ours.
    """
