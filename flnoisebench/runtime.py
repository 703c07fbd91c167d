"""The run: exchanges, rounds, commits.

``prepare`` turns settings into a Run; ``Run.execute`` carries it through, from the start or from its last commit.
The runtime names no method and no data set; it finds both through the registry.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flnoisebench import evaluation, inputs, provenance, records, registry, scenario, trees
from flnoisebench.api import Arrays, Dataset, Method, Plan, Protocol, Upload
from flnoisebench.checkpoint import Checkpoint, Commit, Overwritten
from flnoisebench.engine import DeviceImages, Engine, Lane, Look, ServerSide, make_deterministic, set_precision
from flnoisebench.engine.losses import autocast
from flnoisebench.executors import (
    ClientError,
    Debug,
    Executor,
    Job,
    Outcome,
    Processes,
    Serial,
    Threads,
    as_numbers,
    definition,
    require_finite,
    traced,
)  # fmt: skip
from flnoisebench.imagefiles import reordered
from flnoisebench.profiling import Meter, Presence, peak_memory, synchronise
from flnoisebench.records import Accuracy, LastRounds, RoundRecord, RunResult
from flnoisebench.settings import Settings
from flnoisebench.trees import Tree

TELLABLE = ("noise_rate", "noisy_clients")  # Scenario.told
COUNTED = ("trained", "passed", "skipped")  # images, see RoundRecord
EXECUTORS = ("auto", "serial", "threads", "processes", "debug")


class MethodError(RuntimeError):
    """A method failed on the server's side, or answered what the contract does not allow."""


# Of a round; a plan that never closes one would otherwise go on in silence for ever.  A method may go from client to
# client, so it is the larger of the two.
MOST_EXCHANGES, MOST_EXCHANGES_A_CLIENT = 1000, 10


class AlreadyDone(RuntimeError):
    """The run is complete (or has failed) and its folder holds the result."""

    def __init__(self, folder: Path, result: RunResult) -> None:
        super().__init__(f"this run is already {result.status}: {folder}")
        self.folder, self.result = folder, result


# ----------------------------------------------------------------------------------------------- preparing


def told_to(method: type[Method], nominal: Mapping[str, float]) -> dict[str, float]:
    """What the card says that the method is told, as far as it is known: of Clothing1M's noise nothing is.

    Raises ValueError for a fact that no scenario has.
    """
    strange = set(method.card.told) - set(TELLABLE)
    if strange:
        raise ValueError(
            f"the card of {method.card.title} asks for {sorted(strange)}; a method can be told {', '.join(TELLABLE)}"
        )
    return {name: float(nominal[name]) for name in method.card.told if name in nominal}


def build_engine(
    method_name: str,
    method_settings: Mapping[str, Any],
    protocol: Protocol,
    *,
    deterministic: bool,
    **parts: Any,
) -> Engine:
    """An engine from what can be sent to another process, no true label among it.  parts: as ``Engine`` takes them."""
    method_class = registry.load_method(method_name)
    # after the method's file was imported, which may switch them too, as that of an earlier run in this process
    set_precision(protocol.precision)
    if deterministic:
        make_deterministic()
    return Engine(method_class(method_class.Config(**method_settings)), protocol, **parts)


def pick_devices(wish: str) -> list[torch.device]:
    """auto: the first GPU, else the CPU.  all: every GPU.  Several with commas (``cuda:0,cuda:1``) share one run; the
    first is where the server's part happens.

    Raises ValueError for a device that is not there, or that is named twice.
    """
    if wish == "auto":
        return [torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")]
    if wish == "all":
        if not torch.cuda.is_available():
            raise ValueError("--device all means every GPU, and there is none here")
        return [torch.device("cuda", card) for card in range(torch.cuda.device_count())]
    found: list[torch.device] = []
    for name in wish.split(","):
        try:
            device = torch.device(name.strip())
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"--device must be auto, cpu, cuda, cuda:N, all, or GPUs with commas, not {wish}")
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
        found.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
    if len(set(found)) < len(found) or (len(found) > 1 and torch.device("cpu") in found):
        raise ValueError(f"--device {wish}: several devices must be different GPUs")
    return found


def kind_of(wish: str) -> str:
    """cpu or cuda, what the devices of a wish are; a GPU that is named need not be here, for whoever only reads what
    was run on one.  Raises ValueError as ``pick_devices`` does."""
    return "cuda" if wish.partition(":")[0] in ("cuda", "all") else pick_devices(wish)[0].type


def check_finished(
    folder: Path, settings: Settings, source: str, digests: Mapping[str, str], *, retry: bool = False
) -> None:
    """Whether a run's folder says that it is over.  source: the digest of the method's code (registry.source_digest).
    digests: of the run's data.  retry: a failed run is none that is over.  One that failed in its first round, under
    other code or on other data, is none either.

    Raises AlreadyDone when there is a result, but ValueError when it is another run's, another code's or other data's,
    since its numbers are not this run's, and when settings or records beside it are damaged.
    """
    result = records.result_for(folder, settings)
    if result is None:
        return
    if result.status == "failed" and retry:
        return  # as an unfinished run
    problem = ""
    if result.environment["method_sha256"] != source:
        problem = f"the code of {settings.method} has changed since the run in {folder} ended"
    elif other := records.other_digests(result.digests, digests):
        problem = f"the run in {folder} had other data ({', '.join(other)}: another SHA-256)"
    if not problem:
        raise AlreadyDone(folder, result)
    if result.status == "complete" or result.rounds:  # before the first round is over there is nothing to be mixed
        raise ValueError(f"{problem}. Give this one another --out, or move that folder away")


def prepare(
    settings: Settings,
    *,
    data_root: Path,
    out: Path,
    device: str = "auto",
    lanes: int | None = None,
    executor: str = "auto",
    capture: bool = True,
    arrays: Arrays | None = None,
    scene: tuple[scenario.Scenario, scenario.Truth] | None = None,
) -> Run:
    """Load everything that the settings name.  ``arrays`` and ``scene`` spare loading what the caller has: the whole
    data set and the scenario as drawn, to which the settings' oracle is applied here."""
    devices = pick_devices(device)
    method_class = registry.load_method(settings.method)
    dataset = registry.load_dataset(settings.scenario.dataset)
    if arrays is None:
        arrays = dataset.load(data_root, public=inputs.wants_public(settings.method))
    if scene is None:
        scene = inputs.build_scenario(settings.scenario, dataset, arrays, data_root)
    remarks = scenario.remarks(*scene)
    arrays = inputs.with_foreign(arrays, *scene, data_root)
    arrays, scene = inputs.under_oracle(settings.oracle, arrays, scene)
    return Run(
        settings, method_class, dataset, arrays, *scene, folder=settings.folder(out), device=devices[0],
        beside=devices[1:], lanes=lanes,
        executor=executor,
        capture=capture, remarks=remarks,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the run


@dataclass
class _Open:
    """What a round has gathered so far; JSON-able, since a kill may fall between two exchanges of a round."""

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    images: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> [weighted sum, weight]
    notes: dict[str, Any] = field(default_factory=dict)

    def add(self, meter: Meter) -> None:
        self.images.update(meter.images)
        self.seconds.update(meter.seconds)


@dataclass
class _Position:
    """Where the run is: everything that a commit holds."""

    server: Tree
    clients: dict[int, Tree]
    claims: dict[int, Tree]
    noisy_clients: list[int] | None
    round: int
    exchange: int
    open: _Open
    digest: str
    accuracies: list[float | None]
    label_noise: float | None
    totals: dict[str, Any]
    ended: bool = False
    environments: list[dict[str, Any]] = field(default_factory=list)  # it was carried out in, each once, the last last

    def counters(self) -> dict[str, Any]:
        """All but the trees; JSON-able."""
        counted = {name: value for name, value in vars(self).items() if name not in ("server", "clients", "claims")}
        # written in the background while the next exchange counts on
        return {**counted, "open": copy.deepcopy(vars(self.open))}

    @classmethod
    def of(cls, commit: Commit) -> _Position:
        counters = dict(commit.counters)
        opened = dict(counters.pop("open"))
        opened["images"], opened["seconds"] = Counter(opened["images"]), Counter(opened["seconds"])
        return cls(
            server=commit.server,
            clients=dict(commit.clients),
            claims=dict(commit.claims),
            open=_Open(**opened),
            **counters,
        )


class Run:
    """One run in its folder.  ``execute`` may be called once."""

    def __init__(
        self,
        settings: Settings,
        method_class: type[Method],
        dataset: Dataset,
        arrays: Arrays,
        scene: scenario.Scenario,
        truth: scenario.Truth,
        *,
        folder: Path,
        device: torch.device,
        beside: Sequence[torch.device] = (),
        lanes: int | None = None,
        executor: str = "auto",
        capture: bool = True,
        remarks: Sequence[str] = (),
    ) -> None:
        """device: of the server's part, evaluation and a share of the clients.  beside: further ones for clients.
        remarks: for people, of the scenario as drawn (scenario.remarks)."""
        self.settings = settings
        self.remarks = remarks
        self.folder = folder
        self.device = device
        self.devices = [device, *beside]
        self.told = told_to(method_class, scene.told)
        facts = scenario.summary(scene, truth)
        self.federation = {name: fact for name, fact in facts.items() if name != "transition"}  # the manifest has it
        self._class_names = list(arrays.classes or dataset.classes)
        natural = settings.scenario.partition.law == "natural"
        self._client_names = list(arrays.clients) if natural and arrays.clients else None
        self._method_class = method_class
        self._source = registry.source_digest(method_class)
        self._digests = {**scene.digests, **inputs.public_digest(arrays), **inputs.order_digest(dataset)}
        pixels, labels = inputs.evaluation_set(settings.evaluate_on, arrays, scene, truth)
        places = np.arange(len(labels))
        if not dataset.published_order:
            order = torch.from_numpy(inputs.image_order(len(scene.owner)))
            arrays = replace(arrays, train_images=reordered(arrays.train_images, order))
            scene, truth = scenario.reordered(scene, truth, order.numpy())
            # a predictor sees batch by batch, and a batch of one class by its majority
            places = inputs.image_order(len(labels))
        self.scene = scene
        self.judge = evaluation.Judge(scene, truth)
        look = Look(dataset.mean, dataset.std, dataset.crop_padding, dataset.flip, arrays.crop)
        positions = [scene.positions(client) for client in range(scene.spec.clients)]
        self._sizes = {client: len(rows) for client, rows in enumerate(positions)}
        self._build = partial(
            build_engine,
            settings.method,
            settings.method_settings,
            settings.protocol,
            deterministic=settings.deterministic,
            pixels=arrays.train_images,
            given=torch.as_tensor(np.array(scene.given), dtype=torch.int64),
            positions=positions,
            classes=scene.classes,
            look=look,
            public=arrays.public,
            told=self.told,
            seed=settings.seed,
            capture=capture,
        )
        self.engine = self._build(device=device)
        self.method = self.engine.method
        self._lane = Lane(self.engine)
        self.tested = DeviceImages(pixels.to(device), torch.from_numpy(places).to(device), look)
        self.tested_labels = labels[places]
        self._executor_kind, self._lanes = _choose_executor(executor, lanes, self.devices, settings.protocol.model)
        self._peaks: Mapping[str, int] = {}  # of the executor

    # ---------------------------------------------------------------------------------------- the loop

    def execute(
        self,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        *,
        retry: bool = False,
        on_start: Callable[[int], None] = lambda round: None,
    ) -> RunResult:
        """Carry the run to its end and write result.json.  on_start: told of the round that it begins with, once it is
        sure that it does.

        Resumes where a commit is found.  Raises AlreadyDone when there is a result (``retry`` goes on from the last
        commit of a failed run), ValueError when the folder holds another run, or rounds of this one of another version
        of the method or of other data (before the first round is over the run starts anew instead), ClientError or
        MethodError when the method fails (the result then says "failed"), OSError when the disk does, ChildProcessError
        when a worker is killed.
        """
        try:
            check_finished(self.folder, self.settings, self._source, self._digests, retry=retry)
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint = Checkpoint(self.folder)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write in {self.folder}: {error.strerror}; choose another --out"
            ) from error
        executor: Executor | None = None
        self._presence = Presence(self.devices)
        try:
            # again under the lock: another process may have ended the run since, and its result says where it was made
            check_finished(self.folder, self.settings, self._source, self._digests, retry=retry)
            commit = self._commit_to_resume(checkpoint)
            # of the code that was loaded: the files may be others by the time that the run ends
            self._environment = environment(self.devices, self._executor_kind, self._lanes, self._source)
            self._environment["sharing"] = self._presence.sharing()
            (self.folder / "result.json").unlink(missing_ok=True)  # of the failed run that goes on
            for device in self.devices:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
            executor = self._make_executor()
            position = _Position.of(self._home(commit)) if commit else self._first(checkpoint)
            position.environments = self._environments(position)
            on_start(position.round)
            while not position.ended and position.round < self.settings.protocol.rounds:
                record = self._exchange(position, executor, checkpoint)
                if record is not None:
                    on_round(record)
            checkpoint.wait()
            result = self._result(position, "complete", None)
            records.write_json(self.folder / "result.json", result)
            return result
        except (ClientError, MethodError) as error:
            with suppress(Overwritten):  # it was not committed, and error says by whom
                checkpoint.wait()
            committed = checkpoint.load()
            if committed is not None:
                failed = self._result(_Position.of(committed), "failed", str(error))
                records.write_json(self.folder / "result.json", failed)
            raise
        finally:
            if executor is not None:
                executor.close()
            self._presence.close()
            checkpoint.close()

    def _home(self, commit: Commit) -> Commit:
        """The commit with its tensors on this run's device."""
        return Commit(
            trees.to(commit.server, self.device),
            {client: trees.to(state, self.device) for client, state in commit.clients.items()},
            commit.claims,
            commit.counters,
        )

    def _first(self, checkpoint: Checkpoint) -> _Position:
        server = self._lane.server(0, 0, "init")
        state = self._call("init", 0, 0, lambda: self.method.init(server))
        state = self._accepted_state("init", state, 0, 0)
        noise = self.judge.noise_before()
        images = dict.fromkeys(COUNTED, 0)
        totals = {"bytes_up": 0, "bytes_down": 0, "images": images, "seconds": {}, "peak_memory": 0}
        digest = hashlib.sha256(trees.digest(state).encode()).hexdigest()
        position = _Position(state, {}, {}, None, 0, 0, _Open(), digest, [], noise, totals)
        position.environments = self._environments(position)
        checkpoint.save(Commit(position.server, counters=position.counters()))
        return position

    def _exchange(self, position: _Position, executor: Executor, checkpoint: Checkpoint) -> RoundRecord | None:
        """One exchange, committed.  Returns the round's record when it closes one; moves ``position`` on."""
        started = time.perf_counter()
        round, exchange = position.round, position.exchange
        meter = self._lane.meter  # still holds the seconds of the last commit
        written = trees.writes(position.server)
        server = self._lane.server(round, exchange, "plan")
        with meter.time("plan", self.device):
            plan = self._call("plan", round, exchange, lambda: self.method.plan(position.server, server))
        if plan is None:
            if exchange:
                raise self._refused("plan", round, exchange, "plan ended the run in the middle of a round")
            position.ended = True
            checkpoint.save(Commit(position.server, position.clients, position.claims, position.counters()))
            return None
        messages = self._messages(plan, round, exchange)
        jobs = [
            Job(client, plan.task, message, position.clients.get(client), client in position.clients, round, exchange)
            for client, message in messages.items()
        ]
        with meter.time("clients", self.device):
            outcomes = executor.run(jobs, self._sizes)
            self._peaks = executor.peaks
            require_finite(outcomes, jobs, self.method)
        after = self._lane.server(round, exchange, "aggregate")
        state = self._aggregated(position, outcomes, after, written)
        with meter.time("digest", self.device):
            position.digest = _chained(position.digest, state, outcomes)
        self._gather(position, plan, messages, outcomes, (server, after))
        position.server = state
        record = None
        if plan.closes_round:
            record = self._close_round(position, meter, started)
            position.round, position.exchange, position.open = round + 1, 0, _Open()
        else:
            position.exchange += 1
            if position.exchange == (most := max(MOST_EXCHANGES, MOST_EXCHANGES_A_CLIENT * self.engine.clients)):
                raise self._refused(
                    "plan", round, position.exchange,
                    f"the round is still open after {most} exchanges; no plan had closes_round=True, and the "
                    f"last one's task is {plan.task!r}",
                )  # fmt: skip
            position.open.add(meter.take())
            position.open.seconds["round"] += time.perf_counter() - started  # type: ignore[assignment]
        with meter.time("commit"):
            checkpoint.save(
                Commit(
                    position.server,
                    dict(position.clients),
                    dict(position.claims),
                    position.counters(),
                    None if record is None else record.model_dump_json(),
                )
            )
        return record

    def _messages(self, plan: Plan, round: int, exchange: int) -> dict[int, Tree]:
        """Each cohort member's message; raises MethodError for a plan that the contract does not allow."""

        def refused(text: str) -> MethodError:
            return self._refused("plan", round, exchange, text)

        if not isinstance(plan, Plan):
            raise refused(f"plan must return a Plan or None, not {type(plan).__name__}")
        try:
            cohort = sorted(int(client) for client in plan.cohort)
        except (TypeError, ValueError) as error:
            raise refused(f"the cohort must be a sequence of client ids: {error}") from error
        if not cohort or len(set(cohort)) != len(cohort) or cohort[0] < 0 or cohort[-1] >= self.engine.clients:
            raise refused(
                f"the cohort must be distinct clients of 0..{self.engine.clients - 1}, at least one: {cohort}"
            )
        message = self._accepted("plan", plan.message, "the message", round, exchange)
        if not isinstance(plan.private, Mapping):
            raise refused(f"private additions are a dict by client, not {type(plan.private).__name__}")
        if strangers := set(plan.private) - set(cohort):
            raise refused(f"private additions for clients outside the cohort: {sorted(strangers)}")
        messages: dict[int, Tree] = dict.fromkeys(cohort, message)
        for client, addition in plan.private.items():
            addition = self._accepted("plan", addition, f"the private addition for client {client}", round, exchange)
            if not (isinstance(message, dict) and isinstance(addition, dict)) or message.keys() & addition.keys():
                raise refused(
                    "private additions are merged into the message, so both must be dicts, without a key in common"
                )
            messages[client] = {**message, **addition}
        return messages

    def _aggregated(self, position: _Position, outcomes: Sequence[Outcome], server: ServerSide, written: int) -> Tree:
        """The server's next state.  written: how often the present one was, before plan saw it."""
        round, exchange = position.round, position.exchange
        uploads = tuple(Upload(outcome.client, outcome.size, outcome.reply.upload) for outcome in outcomes)
        uploaded = trees.writes([upload.content for upload in uploads])
        with self._lane.meter.time("aggregate", self.device):
            state = self._call(
                "aggregate", round, exchange, lambda: self.method.aggregate(position.server, uploads, server)
            )
        if state is None and position.server is not None:  # model(None) would begin anew each round, in silence
            raise self._refused(
                "aggregate", round, exchange,
                "aggregate returned None where the server had a state: return the next one, or state where it stays",
            )  # fmt: skip
        state = self._accepted_state("aggregate", state, round, exchange)
        if trees.writes(position.server) != written:
            raise MethodError(
                f"{self._where(round, exchange)}: plan or aggregate wrote into the server's state in place; clone first"
            )
        if trees.writes([upload.content for upload in uploads]) != uploaded:  # it may be part of a client's state
            raise self._refused("aggregate", round, exchange, "aggregate wrote into an upload in place; clone first")
        return state

    def _gather(
        self,
        position: _Position,
        plan: Plan,
        messages: Mapping[int, Tree],
        outcomes: Sequence[Outcome],
        sides: Sequence[ServerSide],
    ) -> None:
        """Note in ``position`` what clients answered, and what the server's sides were told."""
        opened = position.open
        opened.exchanges += 1
        common = trees.nbytes(plan.message)
        opened.bytes_down += sum(common + trees.nbytes(plan.private.get(client, {})) for client in messages)
        for outcome in outcomes:
            client, reply = outcome.client, outcome.reply
            opened.bytes_up += trees.nbytes(reply.upload)
            opened.add(outcome.meter)
            position.clients[client] = outcome.state
            claims = {name: value for name, value in vars(reply.claims).items() if value is not None}
            known = position.claims.get(client, {})
            news = {name: value for name, value in trees.to(claims, "cpu").items() if not _same(value, known.get(name))}
            if news:  # what says the same stays the same object, which the checkpoint need not write again
                position.claims[client] = {**known, **news}
            for name, value in reply.metrics.items():
                total = opened.metrics.setdefault(name, [0.0, 0.0])
                total[0] += value * outcome.size
                total[1] += outcome.size
        for side in sides:
            opened.notes.update(side.notes)
            if side.noisy_clients is not None:
                position.noisy_clients = side.noisy_clients

    def _close_round(self, position: _Position, meter: Meter, started: float) -> RoundRecord:
        round, opened = position.round, position.open
        written = trees.writes(position.server)
        with meter.time("evaluate", self.device):
            server = self._lane.server(round, position.exchange, "predict")

            def predict() -> dict[str, np.ndarray]:
                found = self.method.predictors(position.server, server)
                with autocast(self.device, self.settings.protocol.precision):
                    return evaluation.scores_of(found, self.tested, self.engine.classes)

            scores = self._call("predictors", round, position.exchange, predict)
            measured = evaluation.measure(scores, self.tested_labels)
            position.label_noise = self.judge.noise(position.claims)
            judged = self.judge.judge(position.claims, position.noisy_clients)
            diagnostics = self._call(
                "diagnostics", round, position.exchange,
                lambda: as_numbers(self.method.diagnostics(position.server), "diagnostic"),
            )  # fmt: skip
        if trees.writes(position.server) != written:
            raise MethodError(
                f"{self._where(round, position.exchange)}: predictors or diagnostics wrote into the server's state in "
                "place; clone first"
            )
        chain = position.digest + evaluation.prediction_digest(scores)
        position.digest = hashlib.sha256(chain.encode()).hexdigest()
        position.accuracies = [*position.accuracies, measured["accuracy"]]
        synchronise(self.device)
        opened.add(meter.take())
        opened.seconds["round"] += time.perf_counter() - started  # type: ignore[assignment]
        record = RoundRecord(
            round=round,
            exchanges=opened.exchanges,
            lr=self.settings.protocol.optimiser_at(round).lr,
            **measured,
            label_noise=position.label_noise,
            judged=judged,
            metrics={name: total / max(weight, 1) for name, (total, weight) in opened.metrics.items()},
            diagnostics=diagnostics,
            notes=opened.notes,
            bytes_up=opened.bytes_up,
            bytes_down=opened.bytes_down,
            images={name: int(opened.images[name]) for name in COUNTED},
            seconds={name: _rounded(value) for name, value in sorted(opened.seconds.items())},
            peak_memory=max(peak_memory(device) + self._peaks.get(str(device), 0) for device in self.devices),
            digest=position.digest,
        )
        if self._environment["sharing"] == "alone":  # once beside another, its seconds are not its own
            self._environment["sharing"] = self._presence.sharing()
        totals = position.totals
        position.totals = {
            "bytes_up": totals["bytes_up"] + record.bytes_up,
            "bytes_down": totals["bytes_down"] + record.bytes_down,
            "images": _added(totals["images"], record.images),
            "seconds": _added(totals["seconds"], record.seconds),
            "peak_memory": max(totals["peak_memory"], record.peak_memory),
        }
        return record

    # ------------------------------------------------------------------------------------------ helpers

    def _where(self, round: int, exchange: int) -> str:
        return f"{self._method_class.__name__}, round {round}, exchange {exchange}"

    def _call(self, function: str, round: int, exchange: int, call: Callable[[], Any]) -> Any:
        """Call the method; whatever goes wrong in it becomes a MethodError that says where."""
        try:
            return call()
        except Exception as error:
            cause = traced(error, self.method, function)
            raise MethodError(f"{self._where(round, exchange)}, {function}: {cause}") from error

    def _refused(self, hook: str, round: int, exchange: int, text: str) -> MethodError:
        """What is wrong with what a hook of the method returned."""
        return MethodError(f"{self._where(round, exchange)}: {text}; see {definition(self.method, hook)}")

    def _accepted(self, hook: str, tree: Tree, what: str, round: int, exchange: int) -> Tree:
        """What the method returned, on the run's device, where it would be after a resume; raises MethodError where it
        is no tree or not finite."""
        try:
            trees.check(tree, what)
        except trees.TreeError as error:
            raise self._refused(hook, round, exchange, str(error)) from error
        tree = trees.on(tree, self.engine.device)
        if (bad := trees.first_non_finite(tree)) is not None:
            raise self._refused(hook, round, exchange, f"{what} is not finite at {bad or 'its only value'}")
        return tree

    def _accepted_state(self, hook: str, state: Tree, round: int, exchange: int) -> Tree:
        state = self._accepted(hook, state, f"{hook}'s state", round, exchange)
        if (place := self._lane.shared(state)) is not None:
            raise self._refused(
                hook, round, exchange,
                f"{hook}'s state shares the memory of the server's network at {place or 'its only value'}, which the "
                "next call overwrites: take a copy, as weights(network) does",
            )  # fmt: skip
        return state

    def _commit_to_resume(self, checkpoint: Checkpoint) -> Commit | None:
        """The last commit, of the same run, of the same data, under the same method's code.

        None where the run starts: the folder then says what it is a run of.  Under other code or on other data it
        starts anew while no round was committed, since nothing would be mixed.
        """
        commit = checkpoint.load()
        path = self.folder / "settings.json"
        found = None
        if path.exists():
            found = records.advised(records.load_settings, self.folder)
            if not self.settings.same_run(found):
                raise ValueError(f"{path} describes another run; give this one another --out, or move that folder away")
        elif commit is not None:  # it was there before the first commit
            raise ValueError(
                f"{path} is missing, so that nobody can say of which run the checkpoint is; move {self.folder} away, "
                "or give this run another --out"
            )
        source, data, what = (self.folder / "checkpoint" / name for name in ("method.sha256", "data.json", "run.json"))
        if commit is not None and what.exists():  # checkpoints had none at first
            began = records.advised(lambda folder: records.parse(Settings, what.read_bytes(), str(what)), self.folder)
            if not self.settings.same_run(began):
                raise ValueError(
                    f"{path} describes another run than the one that its checkpoint began; give this one another "
                    "--out, or move that folder away"
                )
        if problem := self._other_beginning(source, data):
            if commit is not None and commit.counters["round"]:
                raise ValueError(problem)
            checkpoint.discard()
            commit = None
        if commit is None:
            records.replace(source, self._source.encode())
            records.replace(data, json.dumps(self._digests).encode())
            records.replace(what, self.settings.model_dump_json().encode())
        if found != self.settings:  # none is there, or the same was said in other words: the result will repeat these
            records.write_json(path, self.settings)
        return commit

    def _other_beginning(self, source: Path, data: Path) -> str:
        """Why the run cannot go on from what it began with, by the files that hold the digests; "" where it can."""
        if source.exists() and source.read_text() != self._source:
            return (
                f"the code of {self.settings.method} has changed since the run in {self.folder} began; resuming would "
                "mix two versions. Give this one another --out, or move that folder away"
            )
        try:
            before = json.loads(data.read_text()) if data.exists() else self._digests
        except ValueError:
            raise ValueError(
                f"{data} is damaged, so that nobody can say whether the run began with these data. Move {self.folder} "
                "away, or give this one another --out"
            ) from None
        other = sorted(name for name in {*before, *self._digests} if before.get(name) != self._digests.get(name))
        if not other:
            return ""
        return (
            f"the run in {self.folder} began with other data ({', '.join(other)}: another SHA-256); resuming would "
            "mix the two. Put back what it began with, or give this one another --out"
        )

    def _make_executor(self) -> Executor:
        if self._executor_kind == "processes":
            several = self.devices if self.device.type == "cuda" else [self.device] * self._lanes
            devices = [str(device) for device in several][: self._lanes]
            each = -(-self._lanes // len(devices))
            return Processes(self._build, devices, self.device, each)
        if self._executor_kind == "debug":
            return Debug(self.engine)
        if self._executor_kind == "serial":
            return Serial(self.engine)
        beside = [self._build(device=device) for device in self.devices[1 : self._lanes]]
        return Threads(self.engine, self._lanes, beside)

    def _environments(self, position: _Position) -> list[dict[str, Any]]:
        """Those that the run was carried out in, each once, with this process's last."""
        return [*(one for one in position.environments if one != self._environment), self._environment]

    def _result(self, position: _Position, status: Literal["complete", "failed"], failure: str | None) -> RunResult:
        rounds = records.load_records(self.folder)[: position.round]  # the line of a lost commit does not count
        *earlier, now = self._environments(position)
        return RunResult(
            status=status,
            failure=failure,
            settings=self.settings,
            card=records.card_facts(self._method_class.card),
            told=self.told,
            digests=dict(self._digests),
            federation=self.federation,
            class_names=self._class_names,
            client_names=self._client_names,
            accuracy=Accuracy.of(position.accuracies),
            last5=LastRounds.of(rounds),
            label_noise_before=self.judge.noise_before(),
            label_noise_after=position.label_noise,
            wrong_labels_before=self.judge.wrong({}),
            wrong_labels_after=self.judge.wrong(position.claims),
            rounds=position.round,
            bytes_up=position.totals["bytes_up"],
            bytes_down=position.totals["bytes_down"],
            images={name: int(value) for name, value in position.totals["images"].items()},
            seconds={name: _rounded(value) for name, value in sorted(position.totals["seconds"].items())},
            peak_memory=position.totals["peak_memory"],
            digest=position.digest,
            environment={**now, "earlier": earlier} if earlier else now,
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a, b)
    return type(a) is type(b) and a == b


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Name by name; what is nothing in all stays there, as 0 (a sum of Counters would leave it out)."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _rounded(seconds: float) -> float:
    """To microseconds; here, since elsewhere in this file ``round`` is a round's number."""
    return round(seconds, 6)


def _chained(previous: str, state: Tree, outcomes: Sequence[Outcome]) -> str:
    """The digest chain over one exchange: the server's state, every upload and every client's state."""
    parts = [state]
    for outcome in outcomes:
        parts += [outcome.client, outcome.reply.upload, outcome.state]
    return hashlib.sha256((previous + "".join(trees.digests(parts))).encode()).hexdigest()


def _choose_executor(wish: str, lanes: int | None, devices: Sequence[torch.device], model: str) -> tuple[str, int]:
    """(kind, lanes).  auto: 4 lanes on each GPU; on a CPU one a core, up to 4.

    But one for an MLP on a CPU, whose steps are mostly Python: two lanes made digits 13 % slower, Fashion-MNIST with
    small-cnn 1.6 times faster (2 cores).
    """
    if wish not in EXECUTORS:
        raise registry.unknown("executor", wish, EXECUTORS)
    if lanes is not None and lanes < 1:
        raise ValueError(f"--lanes must be at least 1, not {lanes}")
    if wish in ("serial", "debug"):
        if len(devices) > 1:
            raise ValueError(f"--executor {wish} takes one client at a time, so it has no use for several devices")
        return wish, 1
    cores = os.cpu_count() or 1
    if devices[0].type == "cuda":
        count = lanes or 4 * len(devices)
        if count < len(devices):
            raise ValueError(f"--lanes {count} leaves some of {len(devices)} devices without work; ask for more lanes")
    elif wish == "processes":
        count = lanes or cores
    else:
        count = lanes or (1 if model == "mlp" else min(cores, 4))
    if wish == "auto":
        return ("threads", count) if count > 1 else ("serial", 1)
    return wish, count


def environment(devices: Sequence[torch.device], executor: str, lanes: int, source: str) -> dict[str, Any]:
    """What a reader needs to know of where a number comes from."""
    device = devices[0]
    packages = {
        name: importlib.metadata.version(name)
        for name in ("torch", "torchvision", "numpy", "scikit-learn", "flnoisebench")
    }
    return {
        "python": platform.python_version(),
        "packages": packages,
        "commit": provenance.commit(),
        "method_sha256": source,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "processor": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "devices": len(devices),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "executor": executor,
        "lanes": lanes,
    }


def processor() -> str:
    """The CPU's model name, without which seconds on a CPU say nothing; the architecture where no name is known."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
