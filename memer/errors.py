"""Errors that are the user's business: one line, an exit code, the way out.

Exit codes of every command: 0 done, 1 content or result wrong, 2 usage, 3 a source is unavailable.
"""

import sys
from collections.abc import Callable


class MemerError(Exception):
    """Content or result is wrong (exit code 1). The message is one line: what, where, value, way out."""

    exit_code = 1


class UsageError(MemerError):
    """The command was asked for something that does not exist or does not fit together (exit code 2)."""

    exit_code = 2


class SourceUnavailableError(MemerError):
    """A file, folder, model or service that was named cannot be reached (exit code 3)."""

    exit_code = 3


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command; print a MemerError as one line on stderr and return its exit code, else the command's.

    Only errors meant for users are caught: a bug keeps its traceback.
    """
    try:
        return command() or 0
    except MemerError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
