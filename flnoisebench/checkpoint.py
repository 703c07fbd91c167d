"""The checkpoint: content-addressed objects, and one head that is renamed into place.

    checkpoint/objects/<sha256>     lists of trees (trees.to_bytes): the server's state; what clients changed at once
    checkpoint/head.json            where each tree of the last commit lies, counters, length and SHA-256 of
                                    records.jsonl, SHA-256 of what the run began with (BEGAN_WITH)

A commit writes the objects that are not there yet, appends the round's line to records.jsonl, and renames the new
head over the old one: that rename is the commit.  Killed before it, the run resumes from the old head, and the
exchange is redone identically; whatever the head does not name is swept away.  A background thread writes, one
commit behind at most: a kill loses the exchange under way and the one being written, no more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flnoisebench import trees
from flnoisebench.records import replace
from flnoisebench.trees import Tree

FORMAT = 1
BEGAN_WITH = ("data.json", "method.sha256", "run.json")  # beside the head, written by the run before its first commit


class Damaged(ValueError):
    """A checkpoint that cannot be read; the message says which file and what to do."""


class Overwritten(RuntimeError):
    """A tree changed in place while it was being written; that commit was not made."""


class Busy(RuntimeError):
    """Another process is running in this folder."""


@dataclass(frozen=True)
class Commit:
    """All that a run needs to go on.  counters: JSON-able.  clients, claims: by client id."""

    server: Tree
    clients: Mapping[int, Tree] = field(default_factory=dict)
    claims: Mapping[int, Tree] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    record: str | None = None  # the line to append to records.jsonl, when this commit closes a round


class Checkpoint:
    """The checkpoint of one run's folder.  Holds the folder's lock until closed."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        self.records = folder / "records.jsonl"
        self._objects = folder / "checkpoint" / "objects"
        self._head = folder / "checkpoint" / "head.json"
        self._objects.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        # of each slot: the tree that was written last, the object that holds it, and its place in that object
        self._known: dict[str, tuple[Tree, str, int]] = {}
        self._records_length = 0
        self._records_sum = hashlib.sha256()  # of these bytes
        self._began_with: dict[str, str] | None = None  # file -> SHA-256; None before there is a commit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # ------------------------------------------------------------------------------------------ reading

    def load(self) -> Commit | None:
        """The last commit, or None where there is none.  Sweeps what a kill left behind.

        Raises Damaged when the head, or a file that it vouches for, is missing, cut short or altered.
        """
        if not self._head.exists():
            # the first commit brings no record, so where there are records there has been a head
            if self.records.exists() and self.records.stat().st_size:
                raise Damaged(f"{self._head} is missing; {_advice(self.folder)}")
            self._sweep(set())
            return None
        head, counted = read_head(self.folder)
        try:
            objects: dict[str, Tree] = {}
            commit = Commit(
                server=self._read("server", head["server"], objects),
                clients={int(i): self._read(f"client/{i}", place, objects) for i, place in head["clients"].items()},
                claims={int(i): self._read(f"claims/{i}", place, objects) for i, place in head["claims"].items()},
                counters=head["counters"],
            )
        except Damaged:
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"{self._head} is damaged ({error!r}); {_advice(self.folder)}") from error
        self._records_length, self._records_sum = len(counted), hashlib.sha256(counted)
        self._began_with = head.get("began_with")
        if self.records.exists():
            os.truncate(self.records, self._records_length)
        self._sweep({name for _, name, _ in self._known.values()})
        return commit

    def _read(self, slot: str, place: tuple[str, int], objects: dict[str, Tree]) -> Tree:
        name, index = place
        if name not in objects:
            path = self._objects / name
            try:
                data = path.read_bytes()
            except OSError as error:
                raise Damaged(f"{path} ({slot}) cannot be read: {error.strerror}; {_advice(self.folder)}") from error
            if hashlib.sha256(data).hexdigest() != name:
                raise Damaged(
                    f"{path} ({slot}) is cut short or altered: its SHA-256 is not its name; {_advice(self.folder)}"
                )
            objects[name] = trees.from_bytes(data)
        tree = objects[name][index]
        self._known[slot] = (tree, name, index)
        return tree

    # ------------------------------------------------------------------------------------------ writing

    def save(self, commit: Commit) -> None:
        """Write the commit in the background; waits for the one before.  Raises what that one met."""
        self.wait()
        new = [tree for slot, tree in _slots(commit) if not self._has(slot, tree)]
        written = {id(tree): trees.writes(tree) for tree in new}
        self._thread = threading.Thread(target=self._write_guarded, args=(commit, written), name="checkpoint")
        self._thread.start()

    def discard(self) -> None:
        """Forget the commit of a run that starts anew before its first round is over."""
        self._head.unlink(missing_ok=True)
        self._known, self._began_with = {}, None
        self._sweep(set())

    def wait(self) -> None:
        """Until everything is on the disk.  Raises OSError with advice when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                what = "the disk is full" if full else str(error.strerror or error)
                raise OSError(
                    error.errno,
                    f"cannot write the checkpoint in {self.folder}: {what}. The last commit is untouched: make room or "
                    "mend the folder, then run the same command to resume",
                ) from error
            raise error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            os.close(self._lock)

    def _write_guarded(self, commit: Commit, written: Mapping[int, int]) -> None:
        try:
            self._write(commit, written)
        except BaseException as error:  # handed to the run at its next commit
            self._error = error

    def _write(self, commit: Commit, written: Mapping[int, int]) -> None:
        slots = dict(_slots(commit))
        # the server's state in an object of its own, all that clients changed in a second one: two writes to flush,
        # however many clients there are
        changed = [slot for slot in slots if slot != "server" and not self._has(slot, slots[slot])]
        if not self._has("server", slots["server"]):
            self._store(["server"], slots, written)
        if changed:
            self._store(changed, slots, written)
        places = {slot: self._known[slot][1:] for slot in slots}
        head: dict[str, Any] = {
            "format": FORMAT,
            "server": places["server"],
            "clients": {str(i): places[f"client/{i}"] for i in sorted(commit.clients)},
            "claims": {str(i): places[f"claims/{i}"] for i in sorted(commit.claims)},
            "counters": dict(commit.counters),
        }
        if commit.record is not None:
            line = commit.record.encode() + b"\n"
            with open(self.records, "ab") as file:
                file.truncate(self._records_length)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            self._records_length += len(line)
            self._records_sum.update(line)
        if self._began_with is None:
            self._began_with = _beginnings(self.folder)
        head["records_length"] = self._records_length
        head["records_sha256"] = self._records_sum.hexdigest()
        head["began_with"] = self._began_with
        replace(self._head, json.dumps({**head, "sha256": _checksum(head)}).encode())
        self._sweep({name for _, name, _ in self._known.values()})

    def _has(self, slot: str, tree: Tree) -> bool:
        known = self._known.get(slot)
        return known is not None and known[0] is tree  # trees are immutable, so the same object is the same content

    def _store(self, slots: list[str], commit: Mapping[str, Tree], written: Mapping[int, int]) -> None:
        """Write one object with the trees of these slots."""
        data = trees.to_bytes([commit[slot] for slot in slots])
        for slot in slots:
            if trees.writes(commit[slot]) != written[id(commit[slot])]:
                raise Overwritten(f"{slot}: the tree was written in place while it was being saved in {self.folder}")
        name = hashlib.sha256(data).hexdigest()
        path = self._objects / name
        if not path.exists():
            replace(path, data)
        for index, slot in enumerate(slots):
            self._known[slot] = (commit[slot], name, index)

    def _sweep(self, wanted: set[str]) -> None:
        for path in self._objects.iterdir():
            if path.name not in wanted:
                path.unlink()
        self._head.with_name("head.json.tmp").unlink(missing_ok=True)


def read_head(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The head of a run's folder, and the bytes of records.jsonl that it counts.

    Raises FileNotFoundError where there is none; Damaged when it, or a file beside its objects that it vouches for, is
    missing, cut short or altered.
    """
    path, lines = folder / "checkpoint" / "head.json", folder / "records.jsonl"
    try:
        head: dict[str, Any] = json.loads(path.read_text())
        if head.pop("sha256") != _checksum(head):
            raise Damaged(f"{path} was altered: its checksum is not that of its content; {_advice(folder)}")
        if head["format"] != FORMAT:
            raise Damaged(f"{path}: format {head['format']} is not {FORMAT}; {_advice(folder)}")
        length = int(head["records_length"])
        # heads had neither sum at first
        records_sum, began_with = head.get("records_sha256"), head.get("began_with") or {}
    except Damaged:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{path} is damaged ({error!r}); {_advice(folder)}") from error
    counted = lines.read_bytes()[:length] if lines.exists() else b""
    if len(counted) < length:
        raise Damaged(f"{lines} has {len(counted)} bytes where the checkpoint counts {length}; {_advice(folder)}")
    if records_sum not in (None, hashlib.sha256(counted).hexdigest()):
        raise Damaged(f"{lines} was altered: its SHA-256 is not that of the checkpoint; {_advice(folder)}")
    now = _beginnings(folder)
    for name, digest in began_with.items():
        if now.get(name) != digest:
            what = "was altered: its SHA-256 is not that of the checkpoint" if name in now else "is missing"
            raise Damaged(f"{path.with_name(name)} {what}; {_advice(folder)}")
    return head, counted


def _beginnings(folder: Path) -> dict[str, str]:
    paths = [folder / "checkpoint" / name for name in BEGAN_WITH]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}


def _advice(folder: Path) -> str:
    return f"move {folder} away (nothing in it was changed) and run the same command to start again"


def _slots(commit: Commit) -> Iterator[tuple[str, Tree]]:
    yield "server", commit.server
    for kind, by_client in (("client", commit.clients), ("claims", commit.claims)):
        for i, tree in sorted(by_client.items()):
            yield f"{kind}/{i}", tree


def _checksum(head: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head).encode()).hexdigest()


def _lock(folder: Path) -> int:
    """Take the folder's lock.  The kernel frees it when the process ends, however it ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Busy(f"another process is running in {folder}; wait for it, or give this run another --out") from None
    except OSError as error:  # as of network drives that are mounted without locks
        os.close(handle)
        raise OSError(error.errno, f"its file system gives no lock ({error.strerror})") from error
    return handle
