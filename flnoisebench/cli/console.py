"""What all commands share: the two consoles, lines and tables, numbers for people, and how an error ends a command."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flnoisebench.api import MissingData
from flnoisebench.checkpoint import Busy
from flnoisebench.executors import ClientError
from flnoisebench.runtime import MethodError

# emoji=False: "file.py:X:" in a message must not become a red cross
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)

# exit codes: the request cannot be; the work failed; Ctrl-C; SIGTERM
USAGE, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send some seconds before they kill: it stops a command as Ctrl-C does."""


def heed_sigterm() -> None:
    """From now on SIGTERM raises Terminated in the main thread."""

    def stop(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some send it twice, to the process and to its group
        raise Terminated

    signal.signal(signal.SIGTERM, stop)


def stopped(by: KeyboardInterrupt, what: str) -> NoReturn:
    """How a command ends that was stopped.  what: where that leaves its work."""
    if isinstance(by, Terminated):
        fail(f"stopped by SIGTERM; {what}", TERMINATED)
    fail(f"interrupted; {what}", INTERRUPTED)


def fail(message: str, code: int = USAGE) -> NoReturn:
    """One message on stderr, and out."""
    err.print(f"error: {message}", style="bold red" if err.is_terminal else None, markup=False, soft_wrap=True)
    raise typer.Exit(code)


def warn(text: str) -> None:
    """A line on stderr for what people should know, and programs need not."""
    err.print(text, style="yellow" if err.is_terminal else None, markup=False, soft_wrap=True)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the errors that a user can do something about into one clear message and an exit code.

    Everything else is a defect of ours and keeps its traceback.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ClientError, MethodError) as error:
            fail(str(error), FAILED)
        except (MissingData, ValueError, Busy) as error:
            fail(str(error))
        except BrokenPipeError:  # `| head` has read enough: typer ends quietly
            raise
        except OSError as error:
            fail(explained(error), FAILED)
        except KeyboardInterrupt as stop:
            stopped(stop, "the same command resumes from the last commit")

    return run


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explained(error: OSError) -> str:
    """What the operating system refused, and where; our own text where the error was raised with one."""
    text = error.strerror or str(error)
    if error.errno in FULL and text == os.strerror(error.errno):
        text = f"the disk is full ({text}); make room, then run the same command again"
    where = error.filename2 or error.filename
    return text if where is None else f"{where}: {text}"


def line(name: str, *about: str) -> None:
    """``name<TAB>about``: readable on a terminal, parseable elsewhere."""
    text = "\t".join([name, *about])
    if out.is_terminal:
        out.print(text.expandtabs(26), markup=False, soft_wrap=True)
    else:  # rich would turn the tab into spaces
        print(text)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int | None = None
) -> None:
    """A table on a terminal, tab-separated lines without the title elsewhere.  left: how many columns begin at the left
    (default: all); the others are numbers, and end at the right."""
    if not out.is_terminal:
        for texts in (headings, *rows):
            print("\t".join(texts))
        return
    shown = Table(title=title and escape(title), title_justify="left")
    for i, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if left is None or i < left else "right"
        shown.add_column(escape(heading), justify=justify, overflow="fold")
    for texts in rows:
        shown.add_row(*map(escape, texts))  # a name may hold brackets, which rich takes for markup
    out.print(shown)


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1), ("GB", 1)):
        if round(abs(count), digits) < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


BLOCKS = "▁▂▃▄▅▆▇█"


def curve(values: list[float | None], width: int = 60, bounds: tuple[float, float] | None = None) -> str:
    """The values as a line of blocks, low to high; plain dots where the output cannot show blocks.

    bounds: the values of the lowest and the highest block (default: the extremes), for curves on one scale.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = bounds or (min(known), max(known))
    step = max(1, -(-len(values) // width))
    picked = [values[min(i + step - 1, len(values) - 1)] for i in range(0, len(values), step)]
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    marks = BLOCKS if encoding.startswith("utf") else ".:-=+*#@"
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else marks[round((value - low) * scale)] for value in picked)
