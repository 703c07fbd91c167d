"""Which code runs.  setup.py runs this file as well, where nothing is installed: the standard library alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

STAMP = "commit.txt"  # beside this file; filled in by `git archive` (.gitattributes), in wheels and sdists by setup.py
COMMIT = re.compile(r"[0-9a-f]{7,64}(\+changes)?")  # in full, but of the first rows; 64 of a repository of SHA-256
_FIRST: dict[str, str | None] = {}  # what this process was told first


def commit() -> str | None:
    """The git commit of the code that runs; None where nobody knows.

    What FLNOISEBENCH_COMMIT says, else what was written into the archive or wheel that this copy came in, else the
    checkout's.  A process that outlives a commit or a checkout, such as a cluster's worker, says the first that it was
    asked for, "+changes": most of its code is that one's.
    """
    if said := os.environ.get("FLNOISEBENCH_COMMIT"):
        return said
    now = _of_this_copy()
    first = _FIRST.setdefault("commit", now)
    return now if first is None or now in (first, None) else first.removesuffix("+changes") + "+changes"


def _of_this_copy() -> str | None:
    folder = Path(__file__).parent
    return stamped(folder) or commit_of(folder)


def remarks() -> list[str]:
    """What whoever starts a run should know before its hours are spent; nothing where the commit is known."""
    if said := os.environ.get("FLNOISEBENCH_COMMIT"):
        if not COMMIT.fullmatch(said):
            return [f"FLNOISEBENCH_COMMIT is {said!r}, which is no commit of git, and no leaderboard takes such a run"]
        known = _of_this_copy()
        if known is not None and known != said:
            return [f"FLNOISEBENCH_COMMIT says {said}, and this copy is of {known}: the run will name the former"]
        return []
    if commit() is not None:
        return []
    return [
        "nobody knows which commit this copy of flnoisebench is of, and no leaderboard takes such a run: say the "
        "commit in FLNOISEBENCH_COMMIT, or run from a checkout or from a wheel that was built in one"
    ]


def stamped(folder: Path) -> str | None:
    """The commit in the folder's STAMP; None in a checkout, where it is still to be filled in."""
    try:
        said = (folder / STAMP).read_text().strip()
    except OSError:
        return None
    return None if said.startswith("$") else said or None


def commit_of(folder: Path) -> str | None:
    """The git commit of the folder's files, "+changes" when the tree differs from it; None outside a checkout, also
    where they are installed within that of something else."""
    try:
        if not _git(folder, "ls-files"):
            return None
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def reachable(commit: str) -> bool:
    """Whether this copy is a checkout that has the commit, so that ``git checkout`` brings its code back."""
    folder = Path(__file__).parent
    if commit_of(folder) is None:
        return False
    try:
        _git(folder, "cat-file", "-e", commit.removesuffix("+changes") + "^{commit}")
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _git(folder: Path, *arguments: str) -> str:
    # where git itself runs us (a hook, rebase --exec), these name a repository that need not be the folder's
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment)
    return done.stdout.strip()
