"""How the clients of an exchange are carried out: one after the other, at once, or on several devices.

An executor turns jobs into outcomes and knows nothing of rounds.  Whatever the order in which clients finish,
outcomes come back sorted by client, so every executor gives the same bits.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from flnoisebench import trees
from flnoisebench.api import KEEP, Claims, Method, Reply
from flnoisebench.engine import Engine, Lane
from flnoisebench.profiling import Meter, peak_memory
from flnoisebench.trees import Tree


class ClientError(RuntimeError):
    """A client failed.  The message names method, round, exchange, client and task, and the cause."""

    client: int = -1


@dataclass(frozen=True)
class Job:
    """One client's turn.  joined: it has a state; otherwise ``Method.join`` makes its first one."""

    client: int
    task: str
    message: Tree
    state: Tree
    joined: bool
    round: int
    exchange: int


@dataclass(frozen=True)
class Outcome:
    """A finished turn.  state is the client's next one, never KEEP."""

    client: int
    size: int
    reply: Reply
    state: Tree
    meter: Meter


def _claims_checked(claims: Claims, size: int) -> Claims:
    probabilities = "floats in [0, 1], the probability that each given label is right"
    for name, kind in (("labels", "int64"), ("clean", probabilities)):
        value = getattr(claims, name)
        if value is None:
            continue
        fits = isinstance(value, torch.Tensor) and value.shape == (size,)
        if fits and name == "clean":
            # a posterior may be 1 + 2e-16; a NaN lies nowhere
            fits = value.is_floating_point() and bool(((value >= 0) & (value <= 1 + 1e-6)).all())
        elif fits:
            fits = value.dtype == torch.int64
        if not fits:
            raise ValueError(f"claims.{name} must be a tensor [{size}] of {kind}")
        if value.requires_grad:
            raise ValueError(f"claims.{name} still carries a gradient; detach it")
    if not (claims.noisy is None or isinstance(claims.noisy, bool)):
        raise ValueError(f"claims.noisy must be True, False or None, not {type(claims.noisy).__name__}")
    return claims


def perform(lane: Lane, job: Job) -> Outcome:
    """One client's turn on one lane.  Raises ClientError for whatever goes wrong in it."""
    method = lane.engine.method
    lane.meter.take()
    hook, state = "join", job.state
    try:
        with lane.at_work():
            if not job.joined:
                state = _joined(lane, job)
            hook = "client"
            return _turn(lane, job, state)
    except Exception as error:
        failure = ClientError(f"{_where(method, job)}: {traced(error, method, hook)}")
        failure.client = job.client
        raise failure from error


def _where(method: Method, job: Job) -> str:
    who = f"{type(method).__name__}, round {job.round}, exchange {job.exchange}, client {job.client}"
    return f"{who}, task {job.task!r}"


def definition(method: Method, hook: str) -> str:
    """``FedAvg.aggregate (methods/fedavg.py:25)``: where a function of a method is defined."""
    function = inspect.unwrap(getattr(type(method), hook))
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ == Method.__module__:  # it has none of its own
        return f"{type(method).__name__}.{hook} ({inspect.getsourcefile(type(method))})"
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def traced(error: Exception, method: Method, hook: str) -> str:
    """The error with the lines that lead to it; or, where no line is the method's since what a hook of it returned is
    wrong, with the place where that is defined."""
    lines = traceback.extract_tb(error.__traceback__)[1:]
    cause = f"{type(error).__name__}: {error}"
    if all(line.filename.startswith(_PACKAGE) for line in lines):
        return f"{cause}; see {definition(method, hook)}"
    return f"{cause}\n{''.join(traceback.format_list(lines))}"


_PACKAGE = str(Path(__file__).parent) + os.sep


def require_finite(outcomes: Sequence[Outcome], jobs: Sequence[Job], method: Method) -> None:
    """Raise ClientError for the first client whose upload holds a NaN or an infinity.

    For all of an exchange at once: on a GPU every look at a number waits behind what the other lanes have queued, which
    cost each client 10 ms where it looked at its own.
    """
    by_client = {job.client: job for job in jobs}
    for outcome, bad in zip(outcomes, trees.non_finite([outcome.reply.upload for outcome in outcomes]), strict=True):
        if bad is not None:
            where = _where(method, by_client[outcome.client])
            raise ClientError(
                f"{where}: FloatingPointError: the upload is not finite at {bad or 'its only value'}; see "
                f"{definition(method, 'client')}"
            )


def _joined(lane: Lane, job: Job) -> Tree:
    """The client's first state, on the lane's device, where it would be after a resume."""
    state = lane.engine.method.join(lane.client(job.client, None, job.round, job.exchange, role="join"))
    trees.check(state, "join's state")
    return trees.on(state, lane.engine.device)


def _turn(lane: Lane, job: Job, state: Tree) -> Outcome:
    """``perform`` of a client that has a state, without its errors' dress."""
    method, device = lane.engine.method, lane.engine.device
    side = lane.client(job.client, state, job.round, job.exchange)
    written = trees.writes(job.message) + trees.writes(state)
    reply = method.client(job.task, job.message, side)
    if not isinstance(reply, Reply):
        raise TypeError(f"client() must return a Reply, not {type(reply).__name__}")
    if trees.writes(job.message) + trees.writes(state) != written:
        raise ValueError("the message or the client's state was written in place; both belong to others: clone first")
    trees.check(reply.upload, "upload")
    if reply.state is not KEEP:
        trees.check(reply.state, "state")
    for what, tree in (("upload", reply.upload), ("state", None if reply.state is KEEP else reply.state)):
        if (place := lane.shared(tree)) is not None:
            raise ValueError(
                f"the {what} shares the memory of the lane's network at {place or 'its only value'}, which the "
                "next client's turn overwrites: take a copy, as weights(network) does"
            )
    _claims_checked(reply.claims, side.size)
    kept = reply.state is KEEP
    state = state if kept else trees.on(reply.state, device)
    upload, metrics = trees.on(reply.upload, device), as_numbers(reply.metrics, "metric")
    reply = Reply(upload, KEEP if kept else state, metrics, reply.claims)
    return Outcome(job.client, side.size, reply, state, lane.meter.take())


def as_numbers(values: Mapping[str, Any], what: str) -> dict[str, float]:
    """Metrics or diagnostics as floats, without what is not finite: 0 of 0 has no value, and is no part of a mean.

    Raises TypeError for what is no number, such as None.
    """
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last for a tensor of several numbers
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            if "\n" in shown:  # a network, layer by layer
                shown = f"a {type(value).__name__}"
            raise TypeError(
                f"{what} {name!r} must be a number, not {shown}; leave out what has no value this time, or say nan"
            ) from None
        if math.isfinite(number):
            found[name] = number
    return found


class Executor(Protocol):
    """What the runtime wants of one."""

    @property
    def peaks(self) -> Mapping[str, int]:
        """{device: the most bytes that processes of its own have held there, added up over these}."""

    def run(self, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Outcome]:
        """All outcomes, sorted by client; raises the ClientError of the lowest client that failed, ChildProcessError
        where a process was killed."""

    def close(self) -> None: ...


def _settle(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all; raise the error of the lowest client, so that a failure has one message on every executor."""
    for _ in as_completed(futures):
        pass
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


class Serial:
    """One client after the other."""

    peaks: Mapping[str, int] = {}

    def __init__(self, engine: Engine) -> None:
        self._lane = Lane(engine)

    def run(self, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Outcome]:
        return [self._perform(job) for job in sorted(jobs, key=lambda job: job.client)]

    def _perform(self, job: Job) -> Outcome:
        return perform(self._lane, job)

    def close(self) -> None:
        pass


class Debug(Serial):
    """Serial, and suspicious: each turn is taken twice and must give the same bits, and neither message nor state
    may change meanwhile, not even through numpy.  Slow; for writing a method."""

    def _perform(self, job: Job) -> Outcome:
        before = trees.digest([job.message, job.state])
        outcomes = [perform(self._lane, job) for _ in range(2)]
        where = _where(self._lane.engine.method, job)
        if trees.digest([job.message, job.state]) != before:
            raise ClientError(f"{where}: the message or the state was changed in place")
        first, second = (trees.digest([outcome.reply.upload, outcome.state]) for outcome in outcomes)
        if first != second:
            raise ClientError(
                f"{where}: two turns with the same message and streams gave different results; is something drawn "
                "outside client.rng and client.seed, or kept between calls?"
            )
        return outcomes[0]


def deal(clients: Sequence[int], sizes: Mapping[int, int], lanes: int) -> list[list[int]]:
    """The clients of each lane, with sums of sizes as even as can be, the largest client of a lane first.

    The largest first, each to the lane with the least to do; then the fullest lane gives or swaps clients away while
    that makes the fullest of the two less full.  With 20 clients on 4 lanes the first step alone leaves lanes idle for
    some percent of a round.
    """
    hands: list[list[int]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for client in sorted(clients, key=lambda client: (-sizes[client], client)):
        lane = min(range(lanes), key=lambda i: (load[i], i))
        hands[lane].append(client)
        load[lane] += sizes[client]

    def improve() -> bool:
        full = max(range(lanes), key=lambda i: (load[i], -i))
        for other in sorted(range(lanes), key=lambda i: (load[i], i)):
            gap = load[full] - load[other]
            for mine in hands[full]:
                for theirs in (None, *hands[other]):
                    moved = sizes[mine] - (0 if theirs is None else sizes[theirs])
                    if 0 < moved < gap:
                        hands[full].remove(mine)
                        hands[other].append(mine)
                        if theirs is not None:
                            hands[other].remove(theirs)
                            hands[full].append(theirs)
                        load[full] -= moved
                        load[other] += moved
                        return True
        return False

    # each exchange makes the two lanes' loads more even, so this ends by itself; the bound is for huge cohorts
    for _ in range(100):
        if not improve():
            break
    return [sorted(hand, key=lambda client: (-sizes[client], client)) for hand in hands]


def _by_part(message: Tree, change: Callable[[Tree], Any]) -> Tree:
    """The message with its parts, which clients share, changed one by one: the entries of a dict, or else the whole."""
    return {key: change(part) for key, part in message.items()} if isinstance(message, dict) else change(message)


def _sent(jobs: Sequence[Job], device: torch.device) -> dict[int, Job]:
    """The jobs with messages and states on ``device``, by client; each different part of the messages is sent once."""
    parts: dict[int, Tree] = {}

    def send(part: Tree) -> Tree:
        if id(part) not in parts:
            parts[id(part)] = trees.to(part, device)
        return parts[id(part)]

    return {
        job.client: replace(job, message=_by_part(job.message, send), state=trees.to(job.state, device)) for job in jobs
    }


def _perform_away(lane: Lane, job: Job, sent: Job, home: torch.device) -> Outcome:
    """``perform`` on a lane whose device need not be ``home``, to which the outcome comes back."""
    outcome = perform(lane, sent)
    if lane.engine.device == home:
        return outcome
    with lane.at_work():
        return _brought(outcome, job, outcome.reply.upload, outcome.state, vars(outcome.reply.claims), home)


def _brought(
    outcome: Outcome, job: Job, upload: Tree, state: Tree, claims: Mapping[str, Any], home: torch.device
) -> Outcome:
    """The outcome of a turn taken elsewhere, with its trees on ``home``; a state that was kept is the job's own."""
    kept = outcome.reply.state is KEEP
    state = job.state if kept and job.joined else trees.to(state, home)
    claimed = Claims(**trees.to(dict(claims), home))
    reply = Reply(trees.to(upload, home), KEEP if kept else state, outcome.reply.metrics, claimed)
    return replace(outcome, reply=reply, state=state)


class Threads:
    """``lanes`` clients at once, each lane a thread with networks and recordings of its own.

    The lanes are spread evenly over the devices of ``engine``, where messages come from and outcomes go to, and of the
    engines ``beside`` it.  Threads rather than a process a device: uploads then go from card to card directly, and a
    replay does not hold Python's lock.  Clients are dealt out before they start, to devices and then to lanes, so with
    full participation a client meets the same lane in every round and its odd last batch is recorded once.
    """

    peaks: Mapping[str, int] = {}

    def __init__(self, engine: Engine, lanes: int, beside: Sequence[Engine] = ()) -> None:
        self._home = engine.device
        engines = [engine, *beside][:lanes]
        self._lanes = [[Lane(one) for _ in range(lanes)[i :: len(engines)]] for i, one in enumerate(engines)]
        # torch's thread count is set once for each thread that calls into it
        self._threads = {
            lane: ThreadPoolExecutor(1, f"lane-{i}-{j}", torch.set_num_threads, (1,))
            for i, group in enumerate(self._lanes)
            for j, lane in enumerate(group)
        }

    def run(self, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Outcome]:
        by_client = {job.client: job for job in jobs}
        started = {}
        for group, guests in zip(self._lanes, deal(sorted(by_client), sizes, len(self._lanes)), strict=True):
            sent = _sent([by_client[client] for client in guests], group[0].engine.device)
            for lane, clients in zip(group, deal(guests, sizes, len(group)), strict=True):
                for client in clients:
                    job = by_client[client]
                    started[client] = self._threads[lane].submit(_perform_away, lane, job, sent[client], self._home)
        return _settle([started[client] for client in sorted(started)])

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)


class Processes:
    """One worker process a device (or several on a CPU), each with lanes of its own.

    ``build(device=...)`` makes a worker's engine.  devices: one entry a worker.  lanes: of each worker.
    Clients are dealt to workers as to lanes; what an exchange sends to a worker is packed once, not once a client, and
    travels through shared memory.
    """

    def __init__(
        self,
        build: Callable[..., Engine],
        devices: Sequence[str],
        home: torch.device,
        lanes: int = 1,
    ) -> None:
        # torch's own multiprocessing shares tensors' memory instead of copying it to each worker; spawn, since a
        # forked process cannot use CUDA
        context = torch.multiprocessing.get_context("spawn")
        self._home = home
        self._devices = devices
        self._peaks = [0] * len(devices)  # of each worker
        self._workers = [
            ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=(build, device, lanes))
            for device in devices
        ]

    def run(self, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Outcome]:
        try:
            return self._run(jobs, sizes)
        except BrokenExecutor:
            raise ChildProcessError(
                "a worker process failed as it began (its traceback stands above), or was killed: out of memory? The "
                "system's log knows (dmesg), and fewer --lanes need less. The same command resumes from the last commit"
            ) from None

    def _run(self, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Outcome]:
        by_client = {job.client: job for job in jobs}
        hands = deal(sorted(by_client), sizes, len(self._workers))
        started = {
            i: worker.submit(_work, _packed([by_client[client] for client in hand]), sizes)
            for i, (worker, hand) in enumerate(zip(self._workers, hands, strict=True))
            if hand
        }
        outcomes: dict[int, Outcome] = {}
        failures: dict[int, ClientError] = {}
        for i, future in started.items():
            light, packed, failed, self._peaks[i] = future.result()
            failures |= {client: ClientError(message) for client, message in failed.items()}
            for outcome, (upload, state, claims) in zip(light, _unpacked(packed), strict=True):
                job = by_client[outcome.client]
                outcomes[outcome.client] = _brought(outcome, job, upload, state, claims, self._home)
        if failures:
            raise failures[min(failures)]
        return [outcomes[client] for client in sorted(outcomes)]

    @property
    def peaks(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for device, peak in zip(self._devices, self._peaks, strict=True):
            total[device] += peak
        return total

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(cancel_futures=True)


def _shared(data: bytes) -> torch.Tensor:
    """Bytes as a tensor in shared memory, which another process of this host reads without a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).share_memory_()


def _unpacked(packed: torch.Tensor) -> Tree:
    return trees.from_bytes(packed.numpy().tobytes())


def _packed(jobs: Sequence[Job]) -> tuple[torch.Tensor, list[Job]]:
    """The jobs' messages and states as one tree in shared memory, each different part of the messages once; and the
    jobs with places in that tree instead."""
    parts: list[Tree] = []
    places: dict[int, int] = {}

    def place(part: Tree) -> int:
        if id(part) not in places:
            places[id(part)] = len(parts)
            parts.append(part)
        return places[id(part)]

    light = [replace(job, message=_by_part(job.message, place), state=None) for job in jobs]
    return _shared(trees.to_bytes([parts, [job.state for job in jobs]])), light


_WORKER: tuple[Engine, Executor] | None = None  # of this worker process


def _leave_with_run() -> None:
    """End this worker when the run's process is gone.  The pool would wait for work for ever where that was killed,
    and keep the card's memory from the run that resumes."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)


def _start_worker(build: Callable[..., Engine], device: str, lanes: int) -> None:
    global _WORKER
    threading.Thread(target=_leave_with_run, daemon=True).start()
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    engine = build(device=device)
    _WORKER = engine, Threads(engine, lanes) if lanes > 1 else Serial(engine)


def _work(
    packed: tuple[torch.Tensor, list[Job]], sizes: Mapping[int, int]
) -> tuple[list[Outcome], torch.Tensor, dict[int, str], int]:
    """In a worker: (outcomes without trees, their trees in shared memory, messages of failed clients, peak memory).

    Trees travel as bytes, so that no device is assumed.
    """
    assert _WORKER is not None
    engine, executor = _WORKER
    content, light = packed
    parts, states = trees.to(_unpacked(content), engine.device)
    jobs = [
        replace(job, message=_by_part(job.message, parts.__getitem__), state=state)
        for job, state in zip(light, states, strict=True)
    ]
    joined = {job.client: job.joined for job in jobs}
    try:
        outcomes = executor.run(jobs, sizes)
    except ClientError as error:
        return [], _shared(trees.to_bytes([])), {error.client: str(error)}, peak_memory(engine.device)
    found, heavy = [], []
    for outcome in outcomes:
        reply = outcome.reply
        keep = reply.state is KEEP and joined[outcome.client]
        heavy.append([reply.upload, None if keep else outcome.state, vars(reply.claims)])
        bare = Reply(None, KEEP if keep else None, reply.metrics)
        found.append(replace(outcome, reply=bare, state=None))
    return found, _shared(trees.to_bytes(heavy)), {}, peak_memory(engine.device)
