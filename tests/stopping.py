"""What tests of stopped runs share: a stop that nothing catches, sessions of one exchange each, what was committed."""

from collections.abc import Callable
from typing import TypeVar
from unittest import mock

from flnoisebench.checkpoint import Checkpoint
from flnoisebench.runtime import Run
from flnoisebench.trees import Tree

Found = TypeVar("Found")


class Stop(BaseException):
    """Not an Exception: nothing in a run may catch it, as nothing catches a kill."""


def in_sessions(execute: Callable[[], Found]) -> tuple[Found, int]:
    """What comes of a run whose every session but the last is stopped at its first commit, and how many were stopped.
    execute: makes the run and carries it out."""
    save, stops = Checkpoint.save, 0

    def save_and_stop(self, commit):
        save(self, commit)
        self.wait()
        raise Stop

    with mock.patch.object(Checkpoint, "save", save_and_stop):
        while True:
            try:
                return execute(), stops
            except Stop:
                stops += 1


def server_state(run: Run) -> Tree:
    """What the server held at the last commit."""
    checkpoint = Checkpoint(run.folder)
    try:
        return checkpoint.load().server
    finally:
        checkpoint.close()
