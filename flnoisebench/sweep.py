"""The sweep: many runs on Dask distributed, one task a run.

Dask brings the workers and says when one is gone; what a run is, where it stands and whether it is done is said by the
run's own folder, so that whatever dies (a worker, the scheduler, this process), the same command goes on from there:

- a worker dies            Dask gives its task to another one, which resumes from the checkpoint to the same bits
- the scheduler dies       the sweep waits for it at the same address and submits what is not done
- this process dies        its workers stop at the end of their round; the same command continues
- another sweep is at it   the run's folder is locked (the kernel frees that); it is looked at again, no worker waits
- a run fails              failure.txt in its folder holds the traceback; the others go on

A worker trains one run at a time in its only thread, since torch's switches are of the process; a GPU is a worker with
the resource ``GPU`` that sees that card alone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import importlib.metadata
import inspect
import logging
import os
import queue
import re
import shutil
import signal
import socket
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import dask
import distributed
import torch
from distributed.scheduler import KilledWorker
from distributed.utils import get_mp_context, silence_logging_cmgr

from flnoisebench import inputs, provenance, records, registry, runtime, scenario
from flnoisebench.api import MissingData
from flnoisebench.checkpoint import Busy, Checkpoint
from flnoisebench.records import RoundRecord, RunResult
from flnoisebench.runs import FAILURE
from flnoisebench.settings import Settings

DEATHS = 5  # workers that may die under a run, without end as long as it gets a round further in between
RETRIES = 2  # of a task that Dask could not start or send
PROBE = ".sweep-probe"  # in the results' folder: how workers know that theirs is ours
TICK = 0.5  # seconds between two looks at the clock and the scheduler
EVERY = 0.5  # seconds between two messages of one run's progress
LONGEST_WAIT = 60.0  # seconds between two looks at a run that another process has
SHOWN = 10  # runs that cannot begin in one message


# ------------------------------------------------------------------------------------------- what a worker does


class _Abandoned(Exception):
    """Nobody waits for this run any more: it stops at the end of a round, where it has been committed."""


def carry(task: Mapping[str, Any]) -> dict[str, Any]:
    """One run in a worker's thread; never raises for what the run does.

    Returns status: ``complete``, ``failed``, ``busy`` (another process has the run), ``stopped`` (cancelled) or
    ``unfit`` (this worker lacks what the probe asks for), and what there is to say about it.
    """
    worker = distributed.get_worker()
    key = worker.get_current_task()
    answer: dict[str, Any] = {"worker": worker.address, "host": socket.gethostname(), "already": False}
    if missing := missing_here(task["probe"], worker):
        return {**answer, "status": "unfit", "failure": "; ".join(missing)}
    settings = Settings.model_validate_json(task["settings"])
    out, data_root, cuda = Path(task["out"]), Path(task["data_root"]), task["device"] == "cuda"
    os.chdir(task["probe"]["cwd"])  # relative paths in the settings are the sweep's
    told = 0.0
    if not gc.get_freeze_count():
        gc.freeze()  # what has been imported stays: collecting after a run then takes 10 ms and not 300

    def tell(record: RoundRecord) -> None:
        nonlocal told
        if worker.status not in (distributed.Status.running, distributed.Status.paused) or _cancelled(worker, key):
            raise _Abandoned
        if time.monotonic() - told >= EVERY or record.round == 0:
            told = time.monotonic()
            say(round=record.round + 1, accuracy=record.accuracy)

    def say(**facts: Any) -> None:
        worker.log_event(task["topic"], {"run": task["run"], "attempt": task["attempt"], **facts})

    say(host=answer["host"], round=None, accuracy=None)
    try:
        folder = settings.folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        Checkpoint(folder).close()  # Busy, before anything is loaded
        if not cuda:
            _forget_peak_memory()
        device = "cuda" if cuda else "cpu"
        prepared = runtime.prepare(settings, data_root=data_root, out=out, device=device, lanes=task["lanes"])
        result = prepared.execute(tell, retry=task["retry"])
        del prepared
    except runtime.AlreadyDone as done:
        result, answer["already"] = done.result, True
    except Busy:
        return {**answer, "status": "busy"}
    except _Abandoned:
        return {**answer, "status": "stopped"}
    except Exception as error:
        return {**answer, "status": "failed", "failure": _first_line(error), "traceback": traceback.format_exc()}
    finally:
        gc.collect()  # the next run in this process begins with the memory of this one
        if cuda:
            torch.cuda.empty_cache()
    return {**answer, **_account(result)}


def _account(result: RunResult) -> dict[str, Any]:
    """What an ``Outcome`` says of a run that is over."""
    return {
        "status": result.status,
        "failure": (result.failure or "").partition("\n")[0] or None,
        "rounds": result.rounds,
        "accuracy": result.accuracy.last5_mean,
        "seconds": result.seconds.get("round", 0.0),
    }


def _cancelled(worker: distributed.Worker, key: Any) -> bool:
    """Whether the scheduler has taken this task back: what its client left behind, or gave up."""
    task = worker.state.tasks.get(key)
    return task is None or task.state not in ("executing", "long-running")


def _forget_peak_memory() -> None:
    """On a CPU the peak is the process's, and this one has had other runs: Linux starts counting anew at this."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _first_line(error: BaseException) -> str:
    """The error as one line, led by its type where the message alone would not say enough."""
    text = (str(error).splitlines() or [""])[0]
    plain = isinstance(error, runtime.MethodError | runtime.ClientError | ValueError) and text
    return text if plain else f"{type(error).__name__}: {text}"


def probe_of(runs: Sequence[Settings], out: Path, data_root: Path, device: str) -> dict[str, Any]:
    """What every worker must find as it is here; ``missing_here`` compares."""
    out.mkdir(parents=True, exist_ok=True)
    files = {Path(registry.file_and_class(run.method)[0]).resolve() for run in runs if ".py" in run.method}
    files |= {Path(run.scenario.partition.file).resolve() for run in runs if run.scenario.partition.file}
    return {
        "version": importlib.metadata.version("flnoisebench"),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "out": str(out),
        "mark": _mark(out),
        "data_root": str(data_root),
        "data": sorted(os.listdir(data_root)) if data_root.is_dir() else [],
        "files": {str(path): _sha256(path) for path in sorted(files)},
        "device": device,
    }


def missing_here(probe: Mapping[str, Any], dask_worker: distributed.Worker) -> list[str]:
    """What the worker that this runs in lacks, in words; nothing where all is well.  (Dask's Client.run fills in a
    parameter of that name.)"""
    found = []
    threads = dask_worker.state.nthreads
    if threads != 1:
        found.append(f"it has {threads} threads, and torch's switches are of the process: start it with --nthreads 1")
    if (version := importlib.metadata.version("flnoisebench")) != probe["version"]:
        found.append(f"flnoisebench {version} is installed, and {probe['version']} on {probe['host']}")
    out = probe["out"]
    try:
        if (Path(out) / PROBE).read_text() != probe["mark"]:
            found.append(f"{out} is another folder than on {probe['host']}: results need one that both see")
        else:
            with tempfile.NamedTemporaryFile(dir=out, prefix=PROBE):
                pass
    except OSError as error:
        found.append(
            f"{out} on {probe['host']} is not there, or not to be written ({error.strerror}): mount it at the same path"
        )
    data_root = Path(probe["data_root"])
    there = set(os.listdir(data_root)) if data_root.is_dir() else set()
    if lacking := sorted(set(probe["data"]) - there):
        found.append(f"{data_root} lacks {', '.join(lacking)}: share the data sets' folder, or copy it")
    for path, digest in probe["files"].items():
        if _sha256(Path(path)) != digest:
            found.append(f"{path} is missing or another file than on {probe['host']}")
    if not os.path.isdir(probe["cwd"]):
        found.append(f"{probe['cwd']}, where the sweep was started, is not there: start it in a shared folder")
    if probe["device"] == "cuda" and not torch.cuda.is_available():
        found.append("torch finds no GPU")
    return found


def _mark(out: Path) -> str:
    """The random name of a results' folder, given to it once, however many sweeps begin at the same time."""
    path = out / PROBE
    with tempfile.NamedTemporaryFile("w", dir=out, prefix=PROBE) as file:
        file.write(uuid.uuid4().hex)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)
    return path.read_text()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


# ------------------------------------------------------------------------------------------- before anything runs


class Identity(NamedTuple):
    """What a result must be of to be a run's: code (registry.source_digest) and data (SHA-256 by name)."""

    source: str
    digests: Mapping[str, str]


def identities(
    runs: Sequence[Settings], data_root: Path, on_message: Callable[[str], None] = lambda text: None
) -> list[Identity]:
    """What each run is of, in their order.  Every data set is loaded and every scenario drawn once, in this process.
    on_message: told, once each, what people should know of the code and of the scenarios.

    Raises ValueError where a run could not begin, and MissingData where files are all that is lacking; the message
    names what cannot begin and why (the first SHOWN).
    """
    by_dataset: dict[str, dict[scenario.ScenarioSpec, list[Settings]]] = {}
    for run in runs:
        by_dataset.setdefault(run.scenario.dataset, {}).setdefault(run.scenario, []).append(run)
    sources = {name: registry.source_digest(registry.load_method(name)) for name in {run.method for run in runs}}
    wanting = {name for name in sources if inputs.wants_public(name)}
    found: dict[Path, Identity] = {}
    remarks = dict.fromkeys(provenance.remarks())
    problems: list[tuple[str, Exception]] = []
    for name, by_scenario in by_dataset.items():
        dataset = registry.load_dataset(name)
        public_images = any(run.method in wanting for ones in by_scenario.values() for run in ones)
        try:
            arrays = dataset.load(data_root, public=public_images)
        except (ValueError, OSError) as error:
            problems.append((name, error))
            continue
        public, order = inputs.public_digest(arrays), inputs.order_digest(dataset)
        arrays = replace(arrays, digest=inputs.data_digest(arrays))  # taken once, and not for every scenario
        for spec, ones in by_scenario.items():
            try:
                scene = inputs.build_scenario(spec, dataset, arrays, data_root)
                for oracle, on in {(run.oracle, run.evaluate_on) for run in ones}:
                    left, cleaned = inputs.under_oracle(oracle, arrays, scene)
                    inputs.evaluation_set(on, left, *cleaned)
            except (ValueError, OSError) as error:
                problems.append((f"{name}/{spec.slug}, draw {spec.draw}", error))
                continue
            remarks |= dict.fromkeys(scenario.remarks(*scene))
            for run in ones:
                digests = {**scene[0].digests, **order, **(public if run.method in wanting else {})}
                found[run.folder(Path())] = Identity(sources[run.method], digests)
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        text = "runs that cannot begin:\n  " + "\n  ".join(f"{where}: {error}" for where, error in problems[:SHOWN])
        missing = all(isinstance(error, MissingData) for _, error in problems)
        raise (MissingData if missing else ValueError)(text + more)
    for remark in remarks:
        on_message(remark)
    return [found[run.folder(Path())] for run in runs]


# --------------------------------------------------------------------------------------------- where workers are


class Place(Protocol):
    """Where the workers are.  name: for people.  lasting: whether it outlives this process, and may come back."""

    name: str
    lasting: bool

    def open(self) -> Any:
        """A context: its value is the scheduler's address, and what was started here is ended with it."""

    def tend(self, unfinished: int) -> None:
        """Called every few seconds: starts again what has ended before its time."""


class Local:
    """Worker processes on this host.  One a run slot, under a nanny that starts it again when it dies.  cards: by the
    numbers that torch gives them (default: all)."""

    lasting = False

    def __init__(
        self,
        *,
        device: str = "cpu",
        workers: int | None = None,
        runs_per_gpu: int = 1,
        cards: Sequence[int] | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"--workers must be at least 1, not {workers}")
        if runs_per_gpu < 1:
            raise ValueError(f"--runs-per-gpu must be at least 1, not {runs_per_gpu}")
        self._cluster: Any = None
        if device == "cuda":
            visible = visible_cards()
            if not visible:
                raise ValueError("--device cuda: torch finds no GPU here")
            if workers is not None:
                raise ValueError("--workers is for CPUs; on GPUs say --runs-per-gpu")
            chosen = visible if cards is None else [visible[card] for card in cards]
            self.cards: list[str | None] = [card for card in chosen for _ in range(runs_per_gpu)]
            self.name = f"{len(chosen)} GPUs of this host, {runs_per_gpu} runs at once on each"
        else:
            self.cards = [None] * (workers or max(2, len(os.sched_getaffinity(0))))
            self.name = f"{len(self.cards)} workers on this host"

    @contextmanager
    def open(self) -> Iterator[str]:
        inside = {"host": "127.0.0.1", "dashboard": False}
        # memory_limit 0: a run's memory is its own business; Dask would kill a worker at 95 % of its share
        worker = {**inside, "nthreads": 1, "memory_limit": 0, "silence_logs": logging.CRITICAL}
        with dask.config.set(
            {
                "distributed.scheduler.allowed-failures": DEATHS,
                "distributed.worker.multiprocessing-method": "forkserver",
                "distributed.worker.profile.enabled": False,
                # a worker that its nanny is starting again is no lost one
                "distributed.deploy.lost-worker-timeout": "60s",
            }
        ):
            # a server that has imported torch once forks the workers: the second one, and one that takes a dead one's
            # place, is there at once.  The two in the middle are what a run may come to import
            get_mp_context().set_forkserver_preload(["distributed", "torchvision", "sklearn.metrics", __name__])
            self._cluster = cluster = distributed.SpecCluster(
                workers={
                    slot: {
                        "cls": distributed.Nanny,
                        "options": worker
                        if card is None
                        else {**worker, "env": {"CUDA_VISIBLE_DEVICES": card}, "resources": {"GPU": 1}},
                    }
                    for slot, card in enumerate(self.cards)
                },
                scheduler={
                    "cls": distributed.Scheduler,
                    "options": {"host": "127.0.0.1", "dashboard": True, "dashboard_address": "127.0.0.1:0"},
                },
                silence_logs=logging.CRITICAL,
            )
            try:
                yield cluster.scheduler_address
            finally:
                for nanny in cluster.workers.values():
                    nanny.auto_restart = False
                    if pid := nanny.pid:  # what a worker holds is on the disk; asked to leave, it takes seconds
                        with suppress(ProcessLookupError):  # it has died just now
                            os.kill(pid, signal.SIGKILL)
                cluster.close()

    def tend(self, unfinished: int) -> None:
        """Nannies start their workers again; this starts again a nanny that gave up."""
        self._cluster.scale(len(self.cards))


def visible_cards() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named = [card.strip() for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card.strip()]
    count = torch.cuda.device_count()  # of those named CUDA takes the ones before the first that is not there
    return named[:count] or [str(card) for card in range(count)]


class Running:
    """A Dask cluster that is there already, by its scheduler's address."""

    lasting = True

    def __init__(self, address: str) -> None:
        self.address = address if "://" in address else f"tcp://{address}"
        self.name = f"the workers of {self.address}"

    def device(self) -> str:
        """``cuda`` where a worker has the resource GPU, else ``cpu``.  Raises ValueError where no scheduler is."""
        try:
            with distributed.Client(self.address, timeout=2, set_as_default=False) as client:
                workers = client.scheduler_info(n_workers=-1)["workers"].values()
        except (OSError, TimeoutError):
            raise ValueError(
                f"no scheduler at {self.address}: start one with `dask scheduler`; with --device cpu or --device cuda "
                "the sweep waits for it"
            ) from None
        return "cuda" if any("GPU" in worker["resources"] for worker in workers) else "cpu"

    @contextmanager
    def open(self) -> Iterator[str]:
        yield self.address

    def tend(self, unfinished: int) -> None:
        """Whoever started it does."""


class Slurm:
    """Workers as SLURM jobs, through dask-jobqueue.  profile: dask_jobqueue.SLURMCluster's keywords, and

    jobs        how many at most
    cores       CPU cores of a job
    processes   runs at once in a job (default 1)
    gpu         true: a job has one GPU, asked for with --gres=gpu:1 unless job_extra_directives ask for one

    A job that ends before its time (walltime, preemption) is submitted again; its runs resume.
    """

    lasting = False

    def __init__(self, profile: Mapping[str, Any]) -> None:
        options = dict(profile)
        jobs, gpu = options.pop("jobs", None), options.pop("gpu", False)
        if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
            raise ValueError("jobs = N, the number of SLURM jobs at most, is missing or less than 1")
        if not isinstance(gpu, bool):
            raise ValueError(f"gpu = {gpu!r}: true or false is wanted; a job has one GPU, more GPUs are more jobs")
        for name in ("cores", "memory"):
            if name not in options:
                raise ValueError(f"{name} is missing: what one job asks for")
        known = slurm_keywords()
        for name in options:
            if name not in known:
                raise registry.unknown("keyword", name, ["jobs", "gpu", *known])
        processes = options.pop("processes", 1)
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
            raise ValueError(f"processes = {processes!r}: the number of runs at once in a job is wanted, at least 1")
        options.setdefault("job_name", "flnoisebench")
        options.update(job_cpu=options.pop("cores"), cores=processes, processes=processes)
        if gpu:
            directives = list(options.get("job_extra_directives", ()))
            if not any(re.match(r"--(gres|tres)\S*gpu|--gpus|-G", directive.strip()) for directive in directives):
                directives.append("--gres=gpu:1")
            options["job_extra_directives"] = directives
            further = list(options.get("worker_extra_args", ()))
            options["worker_extra_args"] = [*further, "--resources", "GPU=1"]
        self.jobs, self.gpu, self.processes, self.options = jobs, gpu, processes, options
        self.name = f"up to {jobs} SLURM jobs"
        self._cluster: Any = None

    @contextmanager
    def open(self) -> Iterator[str]:
        if shutil.which("sbatch") is None:
            raise ValueError(
                "--slurm: there is no sbatch here; run this where jobs are submitted (--dry-run works here)"
            )
        from dask_jobqueue import SLURMCluster

        with dask.config.set({"distributed.scheduler.allowed-failures": DEATHS}):
            self._cluster = SLURMCluster(**self.options)
            try:
                yield self._cluster.scheduler_address
            finally:
                self._cluster.close()
                self._cluster = None

    def tend(self, unfinished: int) -> None:
        wanted = min(self.jobs, -(-unfinished // self.processes))
        # never fewer: which jobs would go is not ours to say, and one of them may be in the middle of a run
        self._cluster.scale(jobs=max(wanted, len(self._cluster.worker_spec)))

    def job_script(self) -> str:
        """What sbatch would be given; the scheduler's address is a blank.  Raises ValueError for an unknown keyword."""
        from dask_jobqueue import SLURMCluster

        async def script(**options: Any) -> str:  # asynchronous: nothing is started before it is awaited
            return SLURMCluster(**{**self.options, **options}, asynchronous=True).job_script()

        logs = self.options.get("log_directory") or dask.config.get("jobqueue.slurm.log-directory")
        if logs is None:
            return asyncio.run(script())
        with tempfile.TemporaryDirectory() as there:  # dask-jobqueue makes the folder, and this is to make none
            return asyncio.run(script(log_directory=there)).replace(there, str(logs))


def slurm_keywords() -> list[str]:
    """What dask_jobqueue.SLURMCluster can be told, as far as a profile may say it."""
    from dask_jobqueue.core import Job, JobQueueCluster
    from dask_jobqueue.slurm import SLURMJob

    ours = {
        "scheduler",
        "scheduler_cls",
        "loop",
        "n_workers",
        "name",
        "asynchronous",
        "config_name",
        "job_cls",
        "job_cpu",
    }
    replaced = {"extra", "env_extra", "header_skip", "job_extra", "project"}  # dask-jobqueue warns of them
    found = [inspect.signature(kind).parameters.values() for kind in (SLURMJob, Job, JobQueueCluster)]
    named = {one.name for each in found for one in each if one.kind is not one.VAR_KEYWORD}
    return sorted(named - ours - replaced)


# ------------------------------------------------------------------------------------------------------ the sweep


@dataclass(frozen=True)
class Outcome:
    """How a run ended.  already: before this sweep.  failure: one line; its traceback is in the folder's failure.txt.
    accuracy: mean of the last five rounds, in percent; seconds: wall time of all its rounds."""

    folder: Path
    status: Literal["complete", "failed"]
    already: bool = False
    failure: str | None = None
    rounds: int = 0
    accuracy: float | None = None
    seconds: float = 0.0


@dataclass
class Standing:
    """Where a run of the sweep stands; changes as the sweep goes on.

    waiting: another process has the run.  round: how many are finished, as far as is known.
    """

    settings: Settings
    folder: Path
    label: str
    identity: Identity | None = None  # known once the sweep has begun
    status: Literal["queued", "submitted", "running", "waiting", "complete", "failed"] = "queued"
    round: int = 0
    accuracy: float | None = None
    host: str = ""
    attempt: int = 0
    outcome: Outcome | None = None
    due: float = 0.0  # monotonic time of the next look, while waiting
    looks: int = 0
    committed: int = 0  # rounds, when its worker last died
    future: Any = field(default=None, repr=False)


class Sweep:
    """Many runs, carried out together.  ``standings`` may be read at any time, by a view for instance.

    on_change(standing): a run's status changed, or it is a round further.  on_message(text): something that people
    should know (a worker that lacks something, a lost scheduler).
    """

    def __init__(
        self,
        runs: Sequence[Settings],
        *,
        out: Path,
        data_root: Path,
        place: Place,
        device: str = "cpu",
        lanes: int | None = None,
        retry: bool = False,
        on_change: Callable[[Standing], None] = lambda standing: None,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:
        """device: ``cpu`` or ``cuda``.  lanes: of each run; by default one on a CPU, where runs share the cores.
        retry: go on with runs that failed before."""
        self.out, self.data_root = out.absolute(), data_root.absolute()
        self.place, self.device, self.retry = place, device, retry
        self.lanes = lanes or (1 if device == "cpu" else None)
        self.dashboard = ""
        self.standings = [
            Standing(run, folder := run.folder(self.out), str(folder.relative_to(self.out))) for run in runs
        ]
        if len({standing.folder for standing in self.standings}) < len(self.standings):
            raise ValueError("a run is named twice")
        self.on_change, self.on_message = on_change, on_message
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._name = uuid.uuid4().hex[:8]
        self._workers: list[str] = []  # their addresses
        self._unfit: dict[str, str] = {}  # address: what it lacks
        self._probe: dict[str, Any] = {}
        self._tended = 0.0

    def carry_out(self) -> list[Outcome]:
        """Until every run is over; outcomes in the order of the runs.

        Raises ValueError or MissingData before anything runs where some run could not begin, ValueError when no worker
        can take a run, KeyboardInterrupt after an orderly stop.
        """
        known = identities([standing.settings for standing in self.standings], self.data_root, self.on_message)
        for standing, identity in zip(self.standings, known, strict=True):
            standing.identity = identity
            self._look(standing)
        if self._unfinished():
            self._probe = probe_of([one.settings for one in self.standings], self.out, self.data_root, self.device)
            # what Dask has to say of lost workers and schedulers is said here, in a line each
            with silence_logging_cmgr(logging.CRITICAL), self.place.open() as address:
                self._loop(address)
        return [one.outcome for one in self.standings if one.outcome is not None]

    @property
    def slots(self) -> int:
        """How many workers can take a run."""
        return len(self._fit())

    def _fit(self) -> list[str]:
        return [address for address in self._workers if address not in self._unfit]

    def _unfinished(self) -> list[Standing]:
        return [one for one in self.standings if one.outcome is None]

    # ----------------------------------------------------------------------------------- the loop over futures

    def _loop(self, address: str) -> None:
        client, looked = self._connected(address), time.monotonic()
        try:
            while self._unfinished():
                if client.status != "running":
                    client = self._again(client, address)
                if time.monotonic() - looked > 5 * TICK:
                    looked = time.monotonic()
                    with suppress(OSError, TimeoutError):  # a scheduler that is going away: the next turn sees it
                        self._count_workers(client)
                self._submit(client)
                self._receive()
        finally:
            self._leave(client)

    def _submit(self, client: distributed.Client) -> None:
        """Keep every worker busy and one run ready behind it, and no more: what a dead worker had waiting counts
        against it, and a run that was finished elsewhere meanwhile need not be sent."""
        if self._unfit and not self._fit():
            return  # those that are there would send it back at once: a fit one may come
        room = 2 * max(1, self.slots) - sum(one.future is not None for one in self.standings)
        now = time.monotonic()
        for number, standing in enumerate(self.standings):
            if room <= 0 or client.status != "running":
                return
            waiting = standing.status == "waiting" and standing.due <= now and standing.future is None
            if (standing.status != "queued" and not waiting) or self._look(standing):
                continue
            room -= 1
            standing.attempt += 1
            task: dict[str, Any] = {
                "run": number,
                "attempt": standing.attempt,
                "settings": standing.settings.model_dump_json(),
                "out": str(self.out),
                "data_root": str(self.data_root),
                "device": self.device,
                "lanes": self.lanes,
                "retry": self.retry,
                "topic": self._name,
                "probe": self._probe,
            }
            try:
                standing.future = client.submit(
                    carry,
                    task,
                    key=f"{standing.label}-{self._name}-{standing.attempt}",
                    pure=False,
                    retries=RETRIES,
                    resources={"GPU": 1} if self.device == "cuda" else None,
                    workers=self._fit() if self._unfit else None,
                    priority=-number,
                )
            except Exception:
                if client.status == "running":
                    raise
                return  # the scheduler went away just now
            if not waiting:
                self._become(standing, "submitted")
            standing.future.add_done_callback(
                lambda future, at=(standing, standing.attempt): self._inbox.put(("future", (*at, future)))
            )

    def _receive(self) -> None:
        """Wait for a tick, or until something happens; then take in all that has happened."""
        try:
            kind, content = self._inbox.get(timeout=TICK)
            while True:
                if kind == "event":
                    self._take_event(content)
                else:
                    self._take_future(*content)
                kind, content = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take_event(self, event: Mapping[str, Any]) -> None:
        standing = self.standings[event["run"]]
        if standing.outcome is not None or event["attempt"] != standing.attempt:
            return
        if event["round"] is None:  # begins, here or elsewhere
            standing.host = event["host"]
            if standing.status != "waiting":
                self._become(standing, "running")
        else:
            standing.round, standing.accuracy = event["round"], event["accuracy"]
            self._become(standing, "running")

    def _take_future(self, standing: Standing, attempt: int, future: distributed.Future) -> None:
        if standing.outcome is not None or attempt != standing.attempt or standing.future is None:
            return
        standing.future = None
        if future.status == "error":
            self._take_error(standing, future.exception(timeout=30))
            return
        try:
            answer = future.result(timeout=30) if future.status == "finished" else {"status": "stopped"}
        except Exception:  # the worker that held the answer, or the scheduler, went away: the run's folder knows
            answer = {"status": "stopped"}
        status = answer["status"]
        if status == "busy":
            if standing.status != "waiting":
                self._become(standing, "waiting")
            standing.due = time.monotonic() + min(2.0**standing.looks, LONGEST_WAIT)
            standing.looks += 1
        elif status == "stopped":
            self._become(standing, "queued")
        elif status == "unfit":
            self._exclude(answer["worker"], answer["host"], answer["failure"])
            self._become(standing, "queued")
        else:
            self._settle(standing, answer)

    def _take_error(self, standing: Standing, error: BaseException | None) -> None:
        if isinstance(error, KilledWorker):
            committed = _rounds(standing.folder)
            began = standing.status == "running"  # else it only lay behind one that kills workers
            if not began or committed > standing.committed:
                standing.committed = committed
                self._become(standing, "queued")
                return
            failure = (
                f"every worker that took this run has died, the last ones at round {committed}: out of memory? "
                "The system's log knows (dmesg); fewer runs at once need less"
            )
            self._settle(standing, {"status": "failed", "failure": failure, "traceback": failure})
            return
        assert error is not None
        text = "".join(traceback.format_exception(error))
        self._settle(standing, {"status": "failed", "failure": _first_line(error), "traceback": text})

    def _settle(self, standing: Standing, answer: Mapping[str, Any]) -> None:
        """The run is over; what failed is written into its folder."""
        path = standing.folder / FAILURE
        if answer["status"] == "complete":
            with suppress(OSError):
                path.unlink(missing_ok=True)
        elif "traceback" in answer:
            where = answer.get("host", "")
            text = f"{standing.label}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')} {where}\n\n{answer['traceback']}"
            try:
                standing.folder.mkdir(parents=True, exist_ok=True)
                records.replace(path, text.encode())
            except OSError as error:
                self.on_message(f"{path} cannot be written ({error.strerror}); it would say:\n{answer['traceback']}")
        standing.outcome = Outcome(
            standing.folder,
            answer["status"],
            already=answer.get("already", False) and standing.attempt <= 1,
            failure=answer.get("failure"),
            rounds=answer.get("rounds", standing.round),
            accuracy=answer.get("accuracy"),
            seconds=answer.get("seconds", 0.0),
        )
        standing.round, standing.accuracy = standing.outcome.rounds, standing.outcome.accuracy
        self._become(standing, standing.outcome.status)

    def _look(self, standing: Standing) -> bool:
        """Whether the folder says that the run is over: it is then settled without a worker.  A result of other data or
        another code is none of this run's, which then counts as failed."""
        assert standing.identity is not None
        try:
            runtime.check_finished(standing.folder, standing.settings, *standing.identity, retry=self.retry)
            return False
        except runtime.AlreadyDone as done:
            result = done.result
        except FileNotFoundError:  # another process goes on with a failed run
            return False
        except (ValueError, OSError) as error:
            self._settle(standing, {"status": "failed", "failure": str(error), "already": True})
            return True
        self._settle(standing, {**_account(result), "already": True})
        return True

    def _become(self, standing: Standing, status: Any) -> None:
        standing.status = status
        self.on_change(standing)

    # ---------------------------------------------------------------------------------- scheduler and workers

    def _connected(self, address: str) -> distributed.Client:
        """A client of a scheduler that has a fit worker; waits for both, where they may still come."""
        told = False
        while True:
            client = None
            try:
                client = distributed.Client(address, timeout=5, set_as_default=False, name=f"flnoisebench-{self._name}")
                client.subscribe_topic(self._name, lambda event: self._inbox.put(("event", event[1])))
                self.dashboard = client.dashboard_link
                self._find_workers(client, address)
                return client
            except (OSError, TimeoutError) as error:
                if client is not None:
                    self._leave(client)
                if not self.place.lasting:
                    raise
                if not told:
                    self.on_message(f"no scheduler at {address} ({_first_line(error)}); waiting for it")
                told = True
                time.sleep(TICK)
            except BaseException:
                if client is not None:
                    self._leave(client)
                raise

    def _find_workers(self, client: distributed.Client, address: str) -> None:
        """See which workers there are and what they lack; raises ValueError when they all lack something."""
        told = False
        self._count_workers(client)
        while not self._workers:
            if not told:
                self.on_message(f"no worker at {address} yet; waiting for one")
            told = True
            time.sleep(TICK)
            self._count_workers(client)
        answers = _asked(client, lambda: client.run(missing_here, self._probe, on_error="return"), timeout=60)
        for worker, answer in answers.items():
            if isinstance(answer, BaseException):
                self._exclude(worker, worker, f"{_first_line(answer)} (is flnoisebench installed there?)")
            elif answer:
                self._exclude(worker, worker, "; ".join(answer))
        if not self.slots:
            lacking = "\n".join(f"  {worker}: {why}" for worker, why in self._unfit.items())
            raise ValueError(f"no worker can take a run:\n{lacking}")

    def _exclude(self, worker: str, host: str, why: str) -> None:
        if worker not in self._unfit:
            self._unfit[worker] = why
            self.on_message(f"worker {host} gets no run: {why}")

    def _count_workers(self, client: distributed.Client) -> None:
        self._workers = list(_asked(client, client.nthreads, timeout=10))
        if time.monotonic() - self._tended > 30 or not self._tended:
            self._tended = time.monotonic()
            self.place.tend(len(self._unfinished()))

    def _again(self, client: distributed.Client, address: str) -> distributed.Client:
        """The scheduler is gone: wait for it to come back, and submit what is not done."""
        self.on_message(
            f"lost the scheduler at {address}; waiting for it to come back (Ctrl-C stops, and loses nothing)"
        )
        self._leave(client)
        for standing in self._unfinished():
            standing.future = None
            standing.attempt += 1  # whatever is still heard of the old attempt does not count
            if standing.status != "waiting":
                self._become(standing, "queued")
        client = self._connected(address)
        self.on_message(f"the scheduler at {address} is back")
        return client

    def _leave(self, client: distributed.Client) -> None:
        """Give back what is still out; workers that outlive this process stop at the end of their round."""
        futures = [one.future for one in self.standings if one.future is not None]
        with suppress(Exception):  # on the way out, of a scheduler that may be gone
            if client.status == "running":
                if futures:
                    _asked(client, lambda: client.cancel(futures), timeout=5)
                client.close(timeout=2)
            else:
                client.close(timeout=0)


def _asked(client: distributed.Client, call: Callable[[], Any], timeout: float) -> Any:
    """A client's call that ends: by itself it would wait for a scheduler that has just died.  Raises TimeoutError."""

    async def answer() -> Any:
        return await call()  # in the client's own loop its calls are coroutines

    return client.sync(answer, callback_timeout=timeout)


def _rounds(folder: Path) -> int:
    try:
        return (folder / "records.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
