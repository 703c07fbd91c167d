"""What every method must keep, checked on a federation that fits into seconds: ``flnoisebench check``.

    from flnoisebench.conformance import check

    def test_my_method_keeps_the_contract():
        check(MyMethod).require()

Each rule is a function of a ``Trial`` that raises ``Broken`` where the rule is broken; ``RULES`` says beside it what it
promises and what to do.  Most rules compare runs of one small world: 4 clients of 24 separable images, two of them
with half of their labels wrong, 12 rounds, so that schedules in shares of a run and warm-ups of up to ten rounds come
to every stage.  What the runtime itself refuses is reported under the rule that it belongs to, in the runtime's words.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import pydantic
import torch

from flnoisebench import records, registry, runtime, scenario, trees
from flnoisebench.api import KEEP, Arrays, Config, Method, Plan, Protocol, Reply, Rounds, Tree, Upload
from flnoisebench.checkpoint import Checkpoint, Commit
from flnoisebench.engine import Engine, Lane, initialised
from flnoisebench.executors import ClientError, Job, as_numbers, perform
from flnoisebench.settings import TRACKS, merged, resolve, validated
from flnoisebench.testing import path_of, tiny_arrays, tiny_engine, tiny_protocol, tiny_run, watch_losses

__all__ = ["ROUNDS", "RULES", "Broken", "Finding", "Report", "Rule", "check"]

ROUNDS = 12  # the methods' absolute warm-ups are of 5 and of 10 rounds
CLIENTS, CLASSES, SAMPLES, TESTED = 4, 3, 96, 60
# the labels of the later half of the clients: half of them wrong, so that stages which part the noisy from the clean
# find both
NOISE = scenario.Noise(clients="ids", ids=(2, 3), rate="constant", tau=0.5, count="exact", include_true=False)
FACTS = {"noise_rate": 0.25, "noisy_clients": 2.0}  # the same, as a card may ask to be told
LEARNT = 1.5 / CLASSES  # of 60 test images a constant answer is right on 20, a random one on more than 30 once in 300
UNTIMED = {"seconds", "peak_memory"}  # what a record may differ in between two runs of the same settings


class Broken(Exception):
    """A rule is broken: what was seen, and where."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.what, self.where = what, where


class Refused(Exception):
    """The plain run does not come to its end, so what others would be compared with is missing."""


class Stopped(BaseException):
    """Not an Exception: nothing in a run may catch it, as nothing catches a kill."""


# ------------------------------------------------------------------------------------------------ the world


def _arrays() -> Arrays:
    return tiny_arrays(CLASSES, SAMPLES, test=TESTED, public=20)


def _other_truth(scene: scenario.Scenario, truth: scenario.Truth) -> scenario.Manifest:
    """Every true label another one, the given labels as they were."""
    assert truth.true is not None
    return scene, replace(truth, true=(truth.true + 1) % scene.classes)


def _lacking_classes(scene: scenario.Scenario, truth: scenario.Truth) -> scenario.Manifest:
    """Client 0 holds one class, the others each lack one (by their given labels)."""
    owner = np.empty_like(scene.owner)
    for label in range(scene.classes):
        rows = np.flatnonzero(scene.given == label)
        holders = [0] if label == 0 else []
        holders += [client for client in range(1, CLIENTS) if (client - 1) % scene.classes != label]
        owner[rows] = np.resize(holders, len(rows))
    return replace(scene, owner=owner), truth


def _one_sample(scene: scenario.Scenario, truth: scenario.Truth) -> scenario.Manifest:
    """Client 1 keeps one sample, client 0 has its others."""
    owner = scene.owner.copy()
    owner[np.flatnonzero(owner == 1)[1:]] = 0
    return replace(scene, owner=owner), truth


Change = Callable[[scenario.Scenario, scenario.Truth], scenario.Manifest]


@dataclass(frozen=True)
class World:
    """A method with its settings and the budget that it is tried under; JSON can hold it, for another process."""

    method: str  # as --method takes it
    settings: Mapping[str, Any]
    protocol: Mapping[str, Any]

    def run(
        self, out: Path, change: Change | None = None, seed: int = 0, executor: str = "serial", **protocol: Any
    ) -> runtime.Run:
        """A run that has not begun.  change: of the scenario (None: as drawn)."""
        return tiny_run(
            self.method,
            out,
            settings=self.settings,
            clients=CLIENTS,
            arrays=_arrays(),
            noise=NOISE,
            seed=seed,
            executor=executor,
            lanes=1 if executor == "serial" else 2,
            change=change,
            **{**self.protocol, **protocol},
        )


class Lasting(NamedTuple):
    """What a run leaves behind that must not depend on how it went."""

    digest: str
    rounds: list[dict[str, Any]]
    accuracy: float | None


def _lasting(folder: Path) -> Lasting:
    result = records.load_result(folder)
    rounds = [record.model_dump(exclude=UNTIMED) for record in records.load_records(folder)]
    return Lasting(result.digest, rounds, result.accuracy.final)


def _difference(expected: Lasting, found: Lasting, fields: Sequence[str] = ()) -> str | None:
    """Where two runs part, or None.  fields: of their records, those to look at; all where none is named."""
    for number, (want, have) in enumerate(zip(expected.rounds, found.rounds, strict=False)):
        if differing := [name for name in fields or want if want[name] != have[name]]:
            return f"round {number}: {', '.join(differing)}"
    if len(expected.rounds) != len(found.rounds):
        return f"{len(expected.rounds)} rounds and {len(found.rounds)}"
    return None if expected.digest == found.digest else "the final digest"


# ---------------------------------------------------------------------------------------------- global randomness


@contextmanager
def _generators_at(seed: int) -> Iterator[Callable[[], list[str]]]:
    """Within it the global generators of random, numpy and torch start at ``seed``; yields a function that names those
    that have moved since.  Afterwards they are as they were."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    start = _generators()
    try:
        yield lambda: [name for name, state in _generators().items() if state != start[name]]
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def _generators() -> dict[str, Any]:
    """The state of each global generator."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "random": random.getstate(),
        "numpy.random": (numpy_state["key"].tobytes(), numpy_state["pos"]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@contextmanager
def _tracing(files: set[str], moved: Callable[[], list[str]]) -> Iterator[list[str]]:
    """Yields a list that gets the first line of these files, "file, line 3", at which a global generator moves.

    Networks are built with torch's own seeded, and it is put back: what happens there is passed over.
    """
    found: list[str] = []
    within: list[tuple[str, int]] = []  # the line at which each running function of these files is
    building = 0

    def compare() -> None:
        if within and not found and moved():
            found.append("{}, line {}".format(*within[-1]))

    def on_line(frame: Any, event: str, _: Any) -> Any:
        compare()
        within.pop()
        if event != "return":
            within.append((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_building(frame: Any, event: str, _: Any) -> Any:
        nonlocal building
        building -= event == "return"
        return on_building

    def on_call(frame: Any, event: str, _: Any) -> Any:
        nonlocal building
        if frame.f_code is initialised.__code__:
            building += 1
            return on_building
        if found or building or frame.f_code.co_filename not in files:
            return None
        compare()
        within.append((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    kept = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield found
    finally:
        sys.settrace(kept)


# -------------------------------------------------------------------------------------------------- a watched run


@dataclass(frozen=True)
class Turn:
    """A client's turn as it was taken: what it was handed, and the digest of what came of it."""

    client: int
    task: str
    message: Tree
    state: Tree
    joined: bool
    round: int
    exchange: int
    digest: str

    @property
    def where(self) -> str:
        return f"round {self.round}, exchange {self.exchange}, client {self.client}, task {self.task!r}"

    def again(self, lane: Lane, message: Tree) -> str:
        """Take it again with this message; the digest."""
        state = self.state if self.joined else None
        job = Job(self.client, self.task, message, state, self.joined, self.round, self.exchange)
        with _blaming(self.where):
            outcome = perform(lane, job)
        return trees.digest(_answer(outcome.reply, outcome.state))


@dataclass(frozen=True)
class ServerTurn:
    """A call of init, plan or aggregate as it was made, and the digest of what it returned, noted and claimed."""

    function: str
    state: Tree
    uploads: tuple[Upload, ...]
    round: int
    exchange: int
    digest: str

    @property
    def where(self) -> str:
        return f"round {self.round}, exchange {self.exchange}, {self.function}"

    def again(self, lane: Lane, uploads: Sequence[Upload]) -> str:
        """Make it again with these uploads; the digest."""
        method, side = lane.engine.method, lane.server(self.round, self.exchange, self.function)
        with _blaming(self.where):
            if self.function == "init":
                found = method.init(side)
            elif self.function == "plan":
                found = _planned(method.plan(self.state, side))
            else:
                found = method.aggregate(self.state, uploads, side)
        return _served(found, side)


def _answer(reply: Reply, state: Tree) -> Tree:
    """All that comes of a client's turn, also for the record only; None where the runtime will refuse it."""
    try:
        answer = [reply.upload, state, as_numbers(reply.metrics, "metric"), vars(reply.claims)]
    except (AttributeError, TypeError):
        return None
    return answer if _is_tree(answer) else None


def _planned(plan: Plan | None) -> Tree:
    if plan is None:
        return None
    private = {str(client): addition for client, addition in plan.private.items()}
    return [plan.task, sorted(map(int, plan.cohort)), plan.message, private, plan.closes_round]


def _served(found: Tree, side: Any) -> str:
    """The digest of all that comes of a call at the server, also for the record only."""
    return trees.digest([found, side.notes, side.noisy_clients])


@dataclass
class Log:
    """What a watched run was seen to do."""

    turns: list[Turn] = field(default_factory=list)
    server: list[ServerTurn] = field(default_factory=list)
    down: dict[int, int] = field(default_factory=dict)  # round -> bytes, counted here
    up: dict[int, int] = field(default_factory=dict)
    written: list[tuple[str, str]] = field(default_factory=list)  # (what, where) of writes in place
    last: Tree = None  # the server's state when it was evaluated last
    on: bool = True  # off after the run: rules go on with its very object, which may have kept something in itself

    @contextmanager
    def guarding(self, what: str, where: str, *several: Tree) -> Iterator[None]:
        """See whether what is handed to the method is as it was when the method returns."""
        before = trees.digests(several)
        yield
        if trees.digests(several) != before:
            self.written.append((what, where))

    @property
    def calls(self) -> list[Turn | ServerTurn]:
        return [*self.turns, *self.server]

    @property
    def spread(self) -> list[Turn]:
        """Of each client and task the first turn, the last, and every third between them."""
        by: dict[tuple[int, str], list[Turn]] = {}
        for turn in self.turns:
            by.setdefault((turn.client, turn.task), []).append(turn)
        return [turn for some in by.values() for turn in [*some[:-1:3], some[-1]]]


def _watched(method: Method, log: Log) -> Method:
    """The method with every call written down."""
    base: Any = type(method)

    class Watched(base):
        @wraps(base.init)
        def init(self, server: Any) -> Tree:
            state = super().init(server)
            if log.on and _is_tree(state):
                log.server.append(ServerTurn("init", None, (), 0, 0, _served(state, server)))
            return state

        @wraps(base.join)
        def join(self, client: Any) -> Tree:
            newcomers.add(client.id)
            return super().join(client)

        @wraps(base.client)
        def client(self, task: str, message: Tree, client: Any) -> Reply:
            where = f"round {client.round}, exchange {client.exchange}, client {client.id}, task {task!r}"
            state, joined = client.state, client.id not in newcomers
            newcomers.discard(client.id)
            if not log.on:
                return super().client(task, message, client)
            with log.guarding("the message or the client's state", where, message, state):
                reply = super().client(task, message, client)
            if not isinstance(reply, Reply):
                return reply
            if answer := _answer(reply, state if reply.state is KEEP else reply.state):
                log.up[client.round] = log.up.get(client.round, 0) + payload(reply.upload)
                digest = trees.digest(answer)
                log.turns.append(Turn(client.id, task, message, state, joined, client.round, client.exchange, digest))
            return reply

        @wraps(base.plan)
        def plan(self, state: Tree, server: Any) -> Plan | None:
            if not log.on:
                return super().plan(state, server)
            with log.guarding("the server's state", f"round {server.round}, plan", state):
                plan = super().plan(state, server)
            if isinstance(plan, Plan) and _is_tree([plan.message, list(plan.private.values())]):
                down = payload(plan.message) * len(plan.cohort) + sum(map(payload, plan.private.values()))
                log.down[server.round] = log.down.get(server.round, 0) + down
                digest = _served(_planned(plan), server)
                log.server.append(ServerTurn("plan", state, (), server.round, server.exchange, digest))
            return plan

        @wraps(base.aggregate)
        def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Any) -> Tree:
            if not log.on:
                return super().aggregate(state, uploads, server)
            contents = [upload.content for upload in uploads]
            where = f"round {server.round}, exchange {server.exchange}, aggregate"
            with log.guarding("the server's state or an upload", where, state, contents):
                after = super().aggregate(state, uploads, server)
            if _is_tree(after):
                digest = _served(after, server)
                log.server.append(ServerTurn("aggregate", state, tuple(uploads), server.round, server.exchange, digest))
            return after

        @wraps(base.predictors)
        def predictors(self, state: Tree, server: Any) -> Any:
            if not log.on:
                return super().predictors(state, server)
            log.last = state
            with log.guarding("the server's state", f"round {server.round}, predictors", state):
                return super().predictors(state, server)

        @wraps(base.diagnostics)
        def diagnostics(self, state: Tree) -> Any:
            if not log.on:
                return super().diagnostics(state)
            with log.guarding("the server's state", "diagnostics", state):
                return super().diagnostics(state)

    newcomers: set[int] = set()
    Watched.__name__, Watched.__qualname__ = base.__name__, base.__qualname__
    return Watched(method.config)


def _normed(method: Method) -> Method:
    """The method with a BatchNorm behind the encoder's features."""
    base: Any = type(method)

    class Normed(base):
        def network(self, encoder: Any) -> torch.nn.Module:
            encoder.body = torch.nn.Sequential(encoder.body, torch.nn.BatchNorm1d(encoder.width))
            return super().network(encoder)

    Normed.__name__, Normed.__qualname__ = base.__name__, base.__qualname__
    return Normed(method.config)


def _is_tree(tree: Any) -> bool:
    """Whether the runtime will take it; what it will not is left to the runtime to refuse."""
    try:
        trees.check(tree, "")
    except trees.TreeError:
        return False
    return True


def payload(tree: Tree) -> int:
    """The bytes of a tree as the accounts define them, counted apart from the runtime and past whatever a subclass of
    dict, list or str may make of its own content."""
    if isinstance(tree, dict):
        return sum(map(payload, dict.values(tree)))
    if isinstance(tree, list | tuple):
        return sum(map(payload, (list if isinstance(tree, list) else tuple).__iter__(tree)))  # type: ignore[arg-type]
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, str):
        return len(str.encode(tree))
    return 0 if tree is None else 8


def over_the_wire(tree: Tree) -> Tree:
    """What arrives elsewhere: the content, and nothing that clung to the objects."""
    return trees.from_bytes(trees.to_bytes(tree))


# ----------------------------------------------------------------------------------------------------- the trial


class Plain(NamedTuple):
    """The run that others are compared with: as it was left, as it was seen, and itself."""

    lasting: Lasting
    log: Log
    run: runtime.Run


def _said(error: BaseException) -> str:
    """An error of a run without its traceback, but with the line of the method's own file that it comes from."""
    text, _, trace = str(error).partition("\n")
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [line for line in lines if not _LIBRARIES.search(line[0])] or lines
    return f"{text} ({own[-1][0]}, line {own[-1][1]})" if own else text


_LIBRARIES = re.compile(rf"^{re.escape(str(Path(__file__).parent))}/|/(torch|numpy|sklearn)/")


@contextmanager
def _blaming(where: str = "") -> Iterator[None]:
    """Whatever a method's code raises within it breaks the rule that called it."""
    try:
        yield
    except (Broken, Refused):
        raise
    except Exception as error:
        known = isinstance(error, RuntimeError | ValueError) and str(error)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        if "\n" not in text and not isinstance(error, ClientError | runtime.MethodError):  # these say where it is
            text += "\n" + "".join(traceback.format_tb(error.__traceback__))
        raise Broken(_said(RuntimeError(text)), where) from error


class Trial:
    """One check of one method: the plain run, made once, and whatever a rule runs beside it."""

    def __init__(self, world: World, method: type[Method], full: bool, out: Path) -> None:
        self.method, self.full, self.settings = method, full, world.settings
        with suppress(ValueError):  # what cannot be is refused by the rules, and by the run itself
            world = replace(world, settings=self.config().model_dump(mode="json"))  # a run's changes must be JSON
        self.world = world
        self.folders = (out / str(number) for number in itertools.count())

    def run(
        self, change: Change | None = None, seed: int = 0, executor: str = "serial", **protocol: Any
    ) -> runtime.Run:
        with _blaming():
            return self.world.run(next(self.folders), change, seed, executor, **protocol)

    def finish(
        self, run: runtime.Run, on_round: Callable[[records.RoundRecord], None] = lambda record: None
    ) -> Lasting:
        with _generators_at(0), _blaming():
            run.execute(on_round)
        return _lasting(run.folder)

    @cached_property
    def _plain(self) -> Plain | str:
        log = Log()
        try:
            with _generators_at(0):
                run = self.run()
                run.engine.method = run.method = _watched(run.method, log)
                lasting = self.finish(run)
        except Broken as error:
            return error.what
        finally:
            log.on = False
        return Plain(lasting, log, run) if lasting.rounds else "the run ended without a round"

    @property
    def plain(self) -> Plain:
        """Raises Refused when that run fails."""
        if isinstance(self._plain, str):
            raise Refused(self._plain)
        return self._plain

    @cached_property
    def elsewhere(self) -> tuple[Lasting, list[str]]:
        """The plain run with the global generators elsewhere, and the names of those that it moved."""
        run = self.run()
        with _generators_at(1) as moved, _blaming():
            run.execute()
            return _lasting(run.folder), moved()

    @cached_property
    def drawn(self) -> tuple[str, str] | None:
        """(what, where) of the first draw from a global generator, if there is one."""
        names = self.elsewhere[1]
        if not names:
            return None
        own = [base.__module__ for base in self.method.__mro__ if base not in Method.__mro__]
        files = {str(sys.modules[name].__file__) for name in own}
        run = self.run()
        with _generators_at(1) as moved, _blaming(), _tracing(files, moved) as found:
            run.execute()
        return f"the global generator of {' and of '.join(names)} was drawn from or seeded", "".join(found)

    def unlike_plain(self, change: Change | None = None, **protocol: Any) -> None:
        """A run of another federation; when the plain one fails already, it says nothing about that."""
        _ = self.plain
        self.finish(self.run(change, **protocol))

    def config(self, preset: str | None = None, dataset: str = "") -> Config:
        """The settings of a preset on a data set (default: those of the trial)."""
        values = self.settings if preset is None else self.method.presets[preset].on(dataset)[0]
        return validated(self.method.Config, values, f"settings of {self.method.__name__}")

    def tried_config(self) -> Config:
        """The settings of the trial; raises Refused where they cannot be."""
        try:
            return self.config()
        except ValueError as error:
            raise Refused(str(error)) from error

    def presets(self) -> Iterator[tuple[str, str, str]]:
        """(preset, data set or "", how to say it) of all that the method names."""
        for name, preset in self.method.presets.items():
            for dataset in ("", *preset.datasets):
                yield name, dataset, f"preset {name!r}" + (f" on {dataset}" if dataset else "")

    def engine(self, touched: Sequence[int]) -> Engine:
        """The plain run's engine with other images and other given labels at these clients."""
        run = self.plain.run
        arrays = _arrays()
        rows = torch.from_numpy(np.isin(run.scene.owner, touched))
        images = torch.where(rows[:, None, None, None], 255 - arrays.train_images, arrays.train_images)
        given = torch.from_numpy(np.array(run.scene.given))
        with _blaming():
            return tiny_engine(
                self.method(run.method.config),
                arrays=replace(arrays, train_images=images),
                given=torch.where(rows, (given + 1) % CLASSES, given),
                positions=[run.scene.positions(client) for client in range(CLIENTS)],
                told=run.told,
                **self.world.protocol,
            )


# -------------------------------------------------------------------------------------------------------- rules


def constructs(trial: Trial) -> None:
    with _blaming("the defaults"):
        trial.config()
    own: dict[tuple[str, str], Any] = {}
    for preset, dataset, where in trial.presets():
        with _blaming(where):
            config = trial.config(preset, dataset)
            _, overrides = trial.method.presets[preset].on(dataset)
            if dataset in registry.names(registry.DATASETS):
                for track in TRACKS:
                    resolve(method=trial.world.method, dataset=dataset, preset=preset, track=track)
            else:  # a data set of another package, or one that is not there yet
                validated(Protocol, merged(Protocol().model_dump(), overrides), "its protocol")
            own[config.model_dump_json(), overrides.get("model", "mlp")] = config, where
    for (_, model), (config, where) in own.items():
        with _blaming(where):
            engine = tiny_engine(
                trial.method(config),
                arrays=tiny_arrays(public=20),
                told={name: fact for name, fact in FACTS.items() if name in trial.method.card.told},
                **{**trial.world.protocol, "model": model},
            )
            engine.method.init(Lane(engine).server(0, 0, "init"))


def refuses_unknown_settings(trial: Trial) -> None:
    known = trial.tried_config().model_dump(mode="json")
    try:
        trial.method.Config(**{**known, "no_such_setting": 1})
    except pydantic.ValidationError:
        return
    raise Broken("Config(no_such_setting=1) is accepted", trial.method.__name__)


def says_why(trial: Trial) -> None:
    def unexplained(kind: type[Config], table: str = "") -> Iterator[str]:
        for name, entry in kind.model_fields.items():
            if not (entry.description or "").strip():
                yield table + name
            if isinstance(entry.annotation, type) and issubclass(entry.annotation, Config):
                yield from unexplained(entry.annotation, f"{table}{name}.")

    if names := list(unexplained(trial.method.Config)):
        raise Broken(f"no reason is given for {', '.join(names)}", f"{trial.method.__name__}.Config")


def settings_survive_json(trial: Trial) -> None:
    found = {"the settings tried": trial.tried_config()}
    for preset, dataset, where in trial.presets():
        try:
            found[where] = trial.config(preset, dataset)
        except ValueError:  # another rule's
            continue
    for where, config in found.items():
        with _blaming(where):
            again = trial.method.Config(**json.loads(json.dumps(config.model_dump(mode="json"))))
        if lost := [name for name in type(config).model_fields if getattr(config, name) != getattr(again, name)]:
            before, after = getattr(config, lost[0]), getattr(again, lost[0])
            raise Broken(f"{lost[0]} = {before!r} comes back from JSON as {after!r}", where)


def gets_through(trial: Trial) -> None:
    _ = trial.plain


def writes_nothing_in_place(trial: Trial) -> None:
    for what, where in trial.plain.log.written:
        raise Broken(f"{what} was changed in place", where)


def repeats(trial: Trial) -> None:
    expected = trial.plain.lasting
    if place := _difference(expected, trial.finish(trial.run())):
        raise Broken("a second run of the same settings and seed is another one", place)


def depends_on_the_seed(trial: Trial) -> None:
    expected = trial.plain.lasting

    def stop_where_they_part(record: records.RoundRecord) -> None:
        if record.digest != expected.rounds[record.round]["digest"]:
            raise Stopped

    with suppress(Stopped):
        trial.finish(trial.run(seed=1), stop_where_they_part)
        raise Broken("seeds 0 and 1 give one run")


def is_pure(trial: Trial) -> None:
    plain = trial.plain
    lane = Lane(plain.run.engine)
    with _generators_at(0):
        for turn in reversed(plain.log.turns):
            if turn.again(lane, turn.message) != turn.digest:
                raise Broken("the same turn taken again, in another order, gives something else", turn.where)
        for call in reversed(plain.log.server):
            if call.again(lane, call.uploads) != call.digest:
                raise Broken("the same call made again, in another order, gives something else", call.where)


class _Halting(Checkpoint):
    """Stops the run when its next commit is on the disk."""

    def save(self, commit: Commit) -> None:
        super().save(commit)
        self.wait()
        raise Stopped


def resumes(trial: Trial) -> None:
    plain = trial.plain
    most = 3 + sum(record["exchanges"] for record in plain.lasting.rounds)  # before the first exchange, and at the end
    out = next(trial.folders)
    for _ in range(most):
        run = trial.world.run(out)
        try:
            with mock.patch.object(runtime, "Checkpoint", _Halting):
                found = trial.finish(run)
        except Stopped:
            continue
        break
    else:
        raise Broken(f"after {most} sessions of one exchange each the run is not at its end")
    if place := _difference(plain.lasting, found):
        raise Broken("stopped and resumed after every exchange, the run is another one", place)
    if trial.full and (place := _difference(plain.lasting, _killed(trial.world, next(trial.folders), most))):
        raise Broken("killed in every exchange and resumed by new processes, the run is another one", place)


class _Dying(Checkpoint):
    """Is killed when one exchange is committed and the next one is done but not committed."""

    saved = 0

    def save(self, commit: Commit) -> None:
        if self.saved:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(commit)
        self.wait()
        self.saved += 1


def _killed(world: World, out: Path, most: int) -> Lasting:
    """The run as it ends when every session of it, a process of its own, dies by SIGKILL."""
    # found where this process finds it: -c alone looks in the current directory first, a checkout's stale metadata too
    places = "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    code = f"{places} from flnoisebench import conformance; conformance._sessions()"
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    order = json.dumps([asdict(world), str(out), most])
    done = subprocess.run(command, input=order, capture_output=True, text=True)
    if done.returncode:
        raise Broken("\n".join(done.stderr.strip().splitlines()[-1:]) or f"the sessions ended with {done.returncode}")
    (folder,) = [path.parent for path in out.rglob("settings.json")]
    return _lasting(folder)


def _sessions() -> None:
    """In a process that has imported torch and trained nothing: one fork of it a session, until one comes to the end.

    Forks, since a new interpreter takes seconds to import torch; the method is imported in the fork, so that what it
    keeps in its module dies too.
    """
    world, out, most = json.load(sys.stdin)
    for _ in range(most):
        pid = os.fork()
        if not pid:
            try:
                run = World(**world).run(Path(out))
                with mock.patch.object(runtime, "Checkpoint", _Dying), _generators_at(0):
                    run.execute()
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {_said(error)}", file=sys.stderr, flush=True)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            sys.exit(os.WEXITSTATUS(status))
    sys.exit(f"after {most} sessions the run is not at its end")


def runs_anywhere(trial: Trial) -> None:
    expected = trial.plain.lasting
    for executor in ("threads", "processes") if trial.full else ("threads",):
        if place := _difference(expected, trial.finish(trial.run(executor=executor))):
            raise Broken(f"the executor {executor} gives another run than serial", place)


def leaves_global_randomness_alone(trial: Trial) -> None:
    expected = trial.plain.lasting
    if trial.drawn is not None:
        raise Broken(*trial.drawn)
    if place := _difference(expected, trial.elsewhere[0]):
        raise Broken("with the global generators of random, numpy and torch elsewhere, the run is another one", place)


def sees_no_other_client(trial: Trial) -> None:
    log = trial.plain.log
    for client in range(CLIENTS):
        lane = Lane(trial.engine([other for other in range(CLIENTS) if other != client]))
        with _generators_at(0):
            for turn in log.turns:  # the others' too: they may leave something behind for this one
                if turn.again(lane, turn.message) != turn.digest and turn.client == client:
                    raise Broken("with other data at the other clients, the same message is answered differently",
                                 turn.where)  # fmt: skip


def server_sees_no_data(trial: Trial) -> None:
    log, lane = trial.plain.log, Lane(trial.engine(range(CLIENTS)))
    with _generators_at(0):
        for call in log.server:
            if call.again(lane, call.uploads) != call.digest:
                raise Broken("with other data at all clients and the same uploads, the server does something else",
                             call.where)  # fmt: skip


def sees_no_truth(trial: Trial) -> None:
    plain = trial.plain
    run, log = trial.run(_other_truth), Log()
    run.engine.method = run.method = _watched(run.method, log)
    run.tested_labels = (run.tested_labels + 1) % CLASSES  # which lie within reach of whoever is called to predict
    found = trial.finish(run)
    said = "with other true labels under the same given ones, the run is another one"
    # accuracies and what is judged are by the truth, and are others by right
    if where := _difference(plain.lasting, found, ("digest", "metrics", "diagnostics", "notes")):
        raise Broken(said, where)
    for one, other in zip(plain.log.calls, log.calls, strict=False):
        if one.digest != other.digest:
            raise Broken(said, f"{one.where}: its claims")


def sends_what_is_counted(trial: Trial) -> None:
    plain = trial.plain
    for record in plain.lasting.rounds:
        number = record["round"]
        for way, counted, seen in (
            ("down", record["bytes_down"], plain.log.down.get(number, 0)),
            ("up", record["bytes_up"], plain.log.up.get(number, 0)),
        ):
            if counted != seen:
                raise Broken(f"{seen} bytes went {way} where {counted} were counted", f"round {number}")
    lane = Lane(trial.engine([]))
    with _generators_at(0):
        for turn in plain.log.spread:
            if turn.again(lane, over_the_wire(turn.message)) != turn.digest:
                raise Broken("a message that comes as bytes is answered differently: something clung to its objects",
                             turn.where)  # fmt: skip
        for call in plain.log.server:
            uploads = [replace(upload, content=over_the_wire(upload.content)) for upload in call.uploads]
            if call.function == "aggregate" and call.again(lane, uploads) != call.digest:
                raise Broken("uploads that come as bytes are aggregated differently: something clung to their objects",
                             call.where)  # fmt: skip


def learns(trial: Trial) -> None:
    accuracy = trial.plain.lasting.accuracy
    if accuracy is None:
        raise Broken("there is no predictor 'main' in the last round")
    if accuracy <= 100 * LEARNT:
        chance = 100 / CLASSES
        raise Broken(
            f"{accuracy:.1f} % of separable test images are right; chance is {chance:.1f} %, asked for is more than "
            f"{100 * LEARNT:.0f} %",
            "the last round",
        )


def can_be_captured(trial: Trial) -> None:
    _ = trial.plain  # a run that fails unwatched says nothing about its losses
    run = trial.run()
    with watch_losses(most=2):
        trial.finish(run)


def predicts(trial: Trial) -> None:
    plain = trial.plain
    lane = Lane(plain.run.engine)
    images = plain.run.tested.plain(torch.arange(TESTED))
    with _blaming("predictors"):
        found = dict(plain.run.method.predictors(plain.log.last, lane.server(len(plain.lasting.rounds), 0, "predict")))
    for name, predict in found.items():
        for size in (TESTED, 7, 1):
            where = f"predictor {name!r}, {size} image{'s' if size > 1 else ''}"
            with torch.no_grad(), _blaming(where):
                scores = predict(images[:size])
            if not isinstance(scores, torch.Tensor) or scores.shape != (size, CLASSES):
                shape = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
                raise Broken(f"the scores are {shape}, not {[size, CLASSES]}", where)
            if not scores.is_floating_point() or not bool(scores.isfinite().all()):
                raise Broken("the scores are not all finite floats", where)


def copes_with_partial_participation(trial: Trial) -> None:
    trial.unlike_plain(participation=0.5)


def copes_with_lacking_classes(trial: Trial) -> None:
    trial.unlike_plain(_lacking_classes)


def copes_with_one_sample(trial: Trial) -> None:
    trial.unlike_plain(_one_sample)


def copes_with_batchnorm(trial: Trial) -> None:
    change: Change | None = _one_sample
    try:
        trial.unlike_plain(change)
    except Broken:  # which another rule says
        change = None
    run = trial.run(change)
    run.engine.method = run.method = _normed(run.method)
    run.engine.batchnorm = True
    trial.finish(run)


@dataclass(frozen=True)
class Rule:
    """promise: what a method that keeps it does.  remedy: what to do where it is broken.  refusal: a pattern of the
    runtime's own words for the same.  repeatable: it asks for the same numbers again, so it says nothing of a method
    that draws from a global generator."""

    name: str
    test: Callable[[Trial], None]
    promise: str
    remedy: str
    refusal: str = r"(?!)"
    repeatable: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        "constructs",
        constructs,
        "It is made from its defaults and from each preset, on each data set that a preset names, in every track.",
        "Mend the preset, or the bounds of the setting that it breaks; a Config needs a default for each setting.",
        r"^settings of ",
    ),
    Rule(
        "unknown-settings",
        refuses_unknown_settings,
        "A setting that it does not have is refused, not ignored.",
        "Derive Config from flnoisebench.api.Config and leave its model_config alone.",
    ),
    Rule(
        "reasons",
        says_why,
        "Each of its settings says why it has its default.",
        'Make it with flnoisebench.api.Field: alpha: float = Field(2.0, unit="...", why="the paper, section 4").',
    ),
    Rule(
        "settings-json",
        settings_survive_json,
        "Its settings are the same after a journey through JSON, as runs and workers take it.",
        "Give the setting a type that JSON can say, or a validator that makes it from what JSON says (as Rounds has).",
    ),
    Rule(
        "immutable",
        writes_nothing_in_place,
        "Messages, states and uploads are not written in place, not even through numpy.",
        "Clone before writing: value.clone().add_(1), or value + 1; .numpy() shares memory, so copy that too.",
        r"written in place|wrote into .* in place|changed in place",
    ),
    Rule(
        "repeats",
        repeats,
        "The same settings and seed give the same run.",
        "Take out what differs from run to run: clocks, addresses, the order of a set, what a run leaves behind.",
        repeatable=True,
    ),
    Rule(
        "seed",
        depends_on_the_seed,
        "Another seed gives another run.",
        "Draw initial weights with side.model() and all else from side.rng(name); seed nothing with a constant.",
        repeatable=True,
    ),
    Rule(
        "pure",
        is_pure,
        "The same call with the same arguments gives the same answer, whatever was called before.",
        "Keep nothing in the object, its class or module: what must last is returned as state.",
        repeatable=True,
    ),
    Rule(
        "resumes",
        resumes,
        "Stopped at any exchange and resumed, the run ends as if undisturbed.",
        "Keep states plain trees (dict, list, tuple, tensors, numbers, strings): a subclass, or an attribute of one, "
        "does not outlive a stop; numpy's numbers become Python's.",
        r"is no plain \w+, which it would be after a resume",
        repeatable=True,
    ),
    Rule(
        "executors",
        runs_anywhere,
        "One client after the other, many at once, or in other processes: the run is the same.",
        "Do not look at threads, processes or what another client's turn left behind, and share no object to write in.",
        repeatable=True,
    ),
    Rule(
        "randomness",
        leaves_global_randomness_alone,
        "The global generators of random, numpy and torch are neither moved nor looked at.",
        "Draw with generator=side.rng(name), sklearn with random_state=side.seed(name); build modules in network().",
    ),
    Rule(
        "client-sight",
        sees_no_other_client,
        "For the same message, other clients' data change nothing in a client's upload, state, metrics or claims.",
        "Use what client offers (labels, data, state), not what can be reached behind it.",
        repeatable=True,
    ),
    Rule(
        "server-sight",
        server_sees_no_data,
        "For the same uploads, the clients' data change nothing at the server.",
        "Use what server offers and what clients upload, not what can be reached behind it.",
        repeatable=True,
    ),
    Rule(
        "truth",
        sees_no_truth,
        "True labels change nothing in the run.",
        "Train and predict from the given labels alone; the truth is the evaluator's.",
        repeatable=True,
    ),
    Rule(
        "bytes",
        sends_what_is_counted,
        "Messages and uploads carry what is counted: elements times item size, 8 a number, UTF-8 length of a string.",
        "Send plain dicts, lists, tuples, tensors, numbers and strings; what a subclass hides or an attribute carries "
        "is not sent.",
        repeatable=True,
    ),
    Rule(
        "learns",
        learns,
        "It beats chance on images that a linear classifier separates.",
        "Look at the curve of a run; settings= and rounds= (--set, --rounds) fit the check to a slow starter.",
    ),
    Rule(
        "capture",
        can_be_captured,
        "Its losses can be recorded once and replayed.",
        "Pass what varies through fit (given=, sample=, draw=, carry=) and weight by masks; no .item(), no branch on a "
        "tensor's value. See flnoisebench.testing.capture_safe.",
        r"is a closure over|make it a static method|must be a plain function|has a hook|cannot be recorded",
        repeatable=True,
    ),
    Rule(
        "predictors",
        predicts,
        "Predictors give finite scores [B, J] for any number of images.",
        "Return floats of one row an image and one column a class; no squeeze(), no logarithm of zero.",
        r"predictor '[^']*' returned",
    ),
    Rule(
        "participation",
        copes_with_partial_participation,
        "It runs when only some of the clients take part in a round.",
        "Take the cohort from server.cohort(), who answered from the uploads; some clients join late.",
    ),
    Rule(
        "lacking-classes",
        copes_with_lacking_classes,
        "It runs when clients lack classes.",
        "Mind counts of zero: clamp before dividing, leave an absent class out.",
    ),
    Rule(
        "one-sample",
        copes_with_one_sample,
        "It runs when a client has a single sample.",
        "Mind a standard deviation of one number, a mixture fitted to one point, an empty half.",
    ),
    Rule(
        "batchnorm",
        copes_with_batchnorm,
        "It runs with a BatchNorm in the network, where a client with a single sample cannot train.",
        "Among the weights are BatchNorm's statistics and its int64 count of steps: do arithmetic on the names in "
        "network.named_parameters(), and average() the rest. "
        "Where a lone sample is skipped, Fit.steps is 0 and batch_sizes() empty.",
    ),
    Rule(
        "runs",
        gets_through,
        "It gets through a whole run.",
        "Read the message; --executor debug names what is not repeatable.",
        "",  # whatever no other rule claims
    ),
)


# -------------------------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class Finding:
    """What became of one rule.  not tried: it could not be, for another rule's reason, which is in ``what``."""

    rule: Rule
    status: Literal["ok", "failed", "not tried"]
    seconds: float
    what: str = ""
    where: str = ""

    def __str__(self) -> str:
        where = f"\n  where: {self.where}" if self.where else ""
        return f"{self.rule.name}: {self.rule.promise}\n  what: {self.what}{where}\n  what to do: {self.rule.remedy}"


@dataclass(frozen=True)
class Report:
    """unreached: settings in absolute rounds beyond the check's, whose stage was therefore not tried."""

    method: str
    rounds: int
    findings: tuple[Finding, ...]
    unreached: Mapping[str, int]

    @property
    def ok(self) -> bool:
        return all(finding.status == "ok" for finding in self.findings)

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "failed")

    @property
    def idle(self) -> dict[str, list[str]]:
        """Why some rules were not tried -> their names."""
        found: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.status == "not tried":
                found.setdefault(finding.what, []).append(finding.rule.name)
        return found

    def require(self) -> None:
        """Raises AssertionError that says what, where, and what to do, unless every rule is kept."""
        if not self.ok:
            rest = [f"not tried: {', '.join(names)}\n  what: {what}" for what, names in self.idle.items()]
            raise AssertionError("\n".join([f"{self.method} does not keep", *map(str, self.failed), *rest]))


def name_of(method: type[Method] | str) -> str:
    """As --method takes it: the entry point's name where there is one, else path/to/file.py:Class."""
    if isinstance(method, str):
        return method
    value = f"{method.__module__}:{method.__qualname__}"
    for entry in entry_points(group=registry.METHODS):
        if entry.value == value:
            return entry.name
    return path_of(method)


def chosen(rules: Sequence[Rule], only: Sequence[str] | None) -> tuple[Rule, ...]:
    """The rules of these names (None: all), in the table's order.  Raises UnknownName."""
    known = [rule.name for rule in rules]
    for name in only or ():
        if name not in known:
            raise registry.unknown("rule", name, known)
    return tuple(rule for rule in rules if not only or rule.name in only)


def check(
    method: type[Method] | str,
    *,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    protocol: Mapping[str, Any] | None = None,
    rounds: int = ROUNDS,
    only: Sequence[str] | None = None,
    full: bool = False,
    rules: Sequence[Rule] = RULES,
    before: Callable[[Rule], None] = lambda rule: None,
) -> Report:
    """Try a method on every rule, in seconds on one core and without files.

    method: a class at the top level of a file, or a name as --method takes it.  settings: laid over the preset's (the
    first one's).  protocol: fields of Protocol laid over the small world's, "optimiser.lr" among them.  rounds: the
    length of the runs, for a method whose stages come later than the 12th round.  only: names of rules.  full: kill
    real processes and run in several, which takes half a minute more.  before: is told of each rule before it is tried.

    Raises ValueError for a method, preset, rule or protocol that is not there.
    """
    name = name_of(method)
    loaded = registry.load_method(name)
    preset = next(iter(loaded.presets)) if preset is None else preset
    if preset not in loaded.presets:
        raise registry.unknown(f"preset of {name}", preset, loaded.presets)
    # of the 24 samples of a client, an uneven last batch too
    values = merged(tiny_protocol(rounds=rounds, batch=10).model_dump(), protocol or {})
    budget = validated(Protocol, values, "protocol")
    world = World(name, {**loaded.presets[preset].on("")[0], **(settings or {})}, budget.model_dump())
    table = chosen(rules, only)
    findings = []
    with tempfile.TemporaryDirectory(prefix="flnoisebench-check-") as folder:
        trial = Trial(world, loaded, full, Path(folder))
        for rule in table:
            before(rule)
            started = time.perf_counter()
            status, what, where = _tried(rule, trial, rules)
            findings.append(Finding(rule, status, time.perf_counter() - started, what, where))
    return Report(name, budget.rounds, tuple(findings), _unreached(loaded, world))


def _tried(rule: Rule, trial: Trial, rules: Sequence[Rule]) -> tuple[Literal["ok", "failed", "not tried"], str, str]:
    try:
        rule.test(trial)
    except Broken as broken:
        if rule.repeatable and (drawn := _drawn(trial)):
            return "not tried", f"randomness: {', '.join(drawn)}", ""
        return "failed", broken.what, broken.where
    except Refused as refused:
        message = str(refused)
        owner = next((one for one in rules if re.search(one.refusal, message)), None)
        return ("failed", message, "") if owner is rule else ("not tried", f"the plain run fails: {message}", "")
    return "ok", "", ""


def _drawn(trial: Trial) -> tuple[str, str] | None:
    try:
        return trial.drawn
    except Broken:  # with the global generators elsewhere the run does not come to its end
        return None


def _unreached(method: type[Method], world: World) -> dict[str, int]:
    try:
        config = method.Config(**world.settings)
    except ValueError:
        return {}
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {
        name: moment.value
        for name, moment in values.items()
        if isinstance(moment, Rounds) and isinstance(moment.value, int) and moment.value >= world.protocol["rounds"]
    }
