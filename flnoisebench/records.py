"""What a run writes: its settings, a record a round, and one result.  Frozen, validated, versioned.

``settings.json`` is written first and says what the run is; ``records.jsonl`` grows by a line a round;
``result.json`` is written last, so that its presence means that the run is over.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from flnoisebench.api import Card, Config, Field
from flnoisebench.settings import Oracle, Settings

SCHEMA = 1
LAST_ROUNDS = 5  # of the headline, as the papers have it
Kind = TypeVar("Kind", bound=Config)
Said = TypeVar("Said")


class _Environment(BaseModel):
    """What readers take for granted of an environment; whatever else is in it stays as it is."""

    method_sha256: str
    commit: str | None = None
    packages: dict[str, str] = {}
    device: str | None = None
    system: str | None = None
    executor: str | None = None
    lanes: int | None = None
    devices: int | None = None
    earlier: list[_Environment] = []


def card_facts(card: Card) -> dict[str, Any]:
    """What results and rows say of a method's card."""
    return {
        "title": card.title,
        "paper": card.paper,
        "year": card.year,
        "conditions": list(card.conditions),
        "told": list(card.told),
    }


class _Card(BaseModel):
    """The same of a card."""

    title: str
    conditions: list[str] = []
    told: list[str] = []


def _shaped(kind: type[BaseModel]) -> AfterValidator:
    """Refuses a table that is not of this shape, in words that say which entry of it."""

    def check(table: dict[str, Any]) -> dict[str, Any]:
        try:
            kind.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return table

    return AfterValidator(check)


Environment = Annotated[dict[str, Any], _shaped(_Environment)]
CardFacts = Annotated[dict[str, Any], _shaped(_Card)]


class RoundRecord(Config):
    """One round, one line of records.jsonl.  Accuracies and rates are in percent, null where there is none."""

    round: int = Field(..., ge=0, unit="from 0", why="index")
    exchanges: int = Field(..., ge=1, why="how many it took")
    lr: float = Field(..., why="the protocol's learning rate of this round")
    accuracy: float | None = Field(..., unit="%", why="predictor main; null before there is one")
    predictors: dict[str, float] = Field(..., unit="%", why="accuracy of every predictor by name")
    balanced_accuracy: float | None = Field(..., unit="%", why="mean of the per-class recalls")
    macro_f1: float | None = Field(..., unit="%", why="mean of the per-class F1")
    calibration_error: float | None = Field(..., unit="%", why="15 equal bins of max softmax(scores)")
    recall: list[float | None] | None = Field(..., unit="%", why="per class; null for one not in the test set")
    label_noise: float | None = Field(..., unit="%", why="wrong labels among those now trained on; null without truth")
    judged: dict[str, float] = Field(..., why="claims against the truth: detection and correction (evaluation.py)")
    metrics: dict[str, float] = Field(..., why="what clients reported, averaged by size; finite values only")
    diagnostics: dict[str, float] = Field(..., why="the method's own, of the server's state; finite values only")
    notes: dict[str, Any] = Field(..., why="what the method wrote down")
    bytes_up: int = Field(..., ge=0, unit="bytes", why="payload of all uploads, without metrics and claims")
    bytes_down: int = Field(..., ge=0, unit="bytes", why="payload of all messages")
    images: dict[str, int] = Field(..., why="trained, passed (without gradient), skipped (last batch)")
    seconds: dict[str, float] = Field(
        ..., unit="s", why="round: wall; clients: wall; fit, apply: summed over lanes; ..."
    )
    peak_memory: int = Field(..., ge=0, unit="bytes", why="of the run's processes together, on its fullest device")
    digest: str = Field(..., why="chain over states, uploads and predictions up to here")


class Point(NamedTuple):
    """Of a RoundRecord what a leaderboard keeps, in its place where there is no other: no diagnostics, then."""

    round: int
    accuracy: float | None
    label_noise: float | None
    diagnostics: Mapping[str, float] = MappingProxyType({})


class Accuracy(Config):
    """In percent.  ``last5_std`` is the spread over the last five rounds of this one run (what the paper
    prints); a spread over seeds or draws is another number and lives in the leaderboard."""

    final: float | None = Field(..., unit="%", why="last round")
    last5_mean: float | None = Field(..., unit="%", why="the paper's number")
    last5_std: float | None = Field(..., unit="%", why="population standard deviation over those rounds")
    last10_mean: float | None = Field(..., unit="%", why="several peers' number")
    oracle: float | None = Field(..., unit="%", why="best round, chosen on the test set: never a result")
    oracle_round: int | None = Field(..., why="which one")

    @classmethod
    def of(cls, rounds: list[float | None]) -> Accuracy:
        """From the accuracy by round."""
        known = [(value, i) for i, value in enumerate(rounds) if value is not None]
        values = [value for value, _ in known]
        best = max(known, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
        return cls(
            final=values[-1] if values else None,
            last5_mean=statistics.fmean(values[-LAST_ROUNDS:]) if values else None,
            last5_std=statistics.pstdev(values[-LAST_ROUNDS:]) if values else None,
            last10_mean=statistics.fmean(values[-10:]) if values else None,
            oracle=best[0],
            oracle_round=best[1],
        )


class LastRounds(Config):
    """Means over the last five rounds that have an accuracy, the headline's rounds, in percent where they are rates.  A
    round without a number is left out of that number's mean; null where no round has it."""

    balanced_accuracy: float | None = Field(..., unit="%", why="see RoundRecord")
    macro_f1: float | None = Field(..., unit="%", why="see RoundRecord")
    calibration_error: float | None = Field(..., unit="%", why="see RoundRecord")
    recall: list[float | None] | None = Field(..., unit="%", why="per class; null for one not in the test set")
    predictors: dict[str, float] = Field(..., unit="%", why="accuracy of every predictor by name")
    judged: dict[str, float] = Field(..., why="detection and correction, names as in RoundRecord")
    diagnostics: dict[str, float] = Field(..., why="the method's own, such as the orthogonality index phi")

    @classmethod
    def of(cls, rounds: Sequence[RoundRecord]) -> LastRounds:
        """From all of a run's records."""
        last = ([record for record in rounds if record.accuracy is not None] or list(rounds))[-LAST_ROUNDS:]

        def mean(values: Iterable[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return statistics.fmean(known) if known else None

        def means(tables: list[dict[str, float]]) -> dict[str, float]:
            names = sorted({name for table in tables for name in table})
            return {name: statistics.fmean(table[name] for table in tables if name in table) for name in names}

        recalls = [record.recall for record in last if record.recall is not None]
        return cls(
            balanced_accuracy=mean(record.balanced_accuracy for record in last),
            macro_f1=mean(record.macro_f1 for record in last),
            calibration_error=mean(record.calibration_error for record in last),
            recall=[mean(column) for column in zip(*recalls, strict=True)] if recalls else None,
            predictors=means([record.predictors for record in last]),
            judged=means([record.judged for record in last]),
            diagnostics=means([record.diagnostics for record in last]),
        )


def other_digests(one: Mapping[str, str], another: Mapping[str, str]) -> list[str]:
    """Names, sorted, of what both have a digest of and that differs.  Public images are there for some methods only."""
    return sorted(name for name in one.keys() & another.keys() if one[name] != another[name])


class RunResult(Config):
    """A finished run.  Accuracies, recalls and ``label_noise_*`` are in percent; what was told of the noise rate, and
    the rates in ``federation`` (a client's nominal, expected and realised ones too), are shares, 0 to 1."""

    schema_version: Literal[1] = Field(SCHEMA, why="of this file")
    status: Literal["complete", "failed"] = Field(..., why="failed: a client, a loss or an upload stopped it")
    failure: str | None = Field(..., why="what, in which method, round, client and task")
    settings: Settings = Field(..., why="as settings.json")
    oracle: Oracle | None = Field(None, why="as in the settings; with one this is a bound, no method's result")
    card: CardFacts = Field(..., why="the method's title, paper, conditions and what it was told")
    told: dict[str, float] = Field(
        ..., why="the values that it was told about the noise: noise_rate, a share, and noisy_clients, how many"
    )
    digests: dict[str, str] = Field(
        ...,
        why="SHA-256 of data, partition, given labels; of public images where the method has them; of the order that "
        "runs put the images into, where they do",
    )
    federation: dict[str, Any] = Field(..., why="the scenario's summary: a row a client, rates overall, all shares")
    class_names: list[str] | None = Field(None, why="by number, the data set's; null in older files")
    client_names: list[str] | None = Field(
        None, why="by number, where the data set names them and is divided so (partition natural), else null"
    )
    accuracy: Accuracy = Field(..., unit="%", why="on evaluate_on")
    last5: LastRounds | None = Field(None, why="the other rates of these rounds; null in older files")
    label_noise_before: float | None = Field(..., unit="%", why="of the given labels; null without truth")
    label_noise_after: float | None = Field(..., unit="%", why="of the labels at the end")
    wrong_labels_before: list[int] | None = Field(
        None, unit="samples", why="given labels that are wrong, of each client; null without truth and in older files"
    )
    wrong_labels_after: list[int] | None = Field(None, unit="samples", why="as above, of the labels at the end")
    rounds: int = Field(..., ge=0, why="completed")
    bytes_up: int = Field(..., ge=0, unit="bytes", why="in all")
    bytes_down: int = Field(..., ge=0, unit="bytes", why="in all")
    images: dict[str, int] = Field(..., why="trained, passed, skipped, in all")
    seconds: dict[str, float] = Field(..., unit="s", why="by part, in all, over every session of the run")
    peak_memory: int = Field(..., unit="bytes", why="the highest of all rounds")
    digest: str = Field(..., why="of the whole run; equal for equal settings on equal hardware")
    environment: Environment = Field(
        ...,
        why="versions, commit, machine, device, lanes; sharing: alone on its device, or beside others in some round, "
        "null where that cannot be seen; earlier: the others that a run that was stopped had before",
    )

    @model_validator(mode="before")
    @classmethod
    def _oracle_is_that_of_the_settings(cls, content: Any) -> Any:
        """Fills it in, so that no writer can leave it out, and refuses another."""
        if not isinstance(content, dict):
            return content
        settings = content.get("settings")
        oracle = settings.get("oracle") if isinstance(settings, dict) else getattr(settings, "oracle", None)
        if content.get("oracle", oracle) != oracle:
            raise ValueError(f"oracle is {content['oracle']!r}, and in the settings {oracle!r}")
        return {**content, "oracle": oracle}

    @model_validator(mode="after")
    def _status_and_failure_agree(self) -> RunResult:
        if (self.status == "failed") != (self.failure is not None):
            raise ValueError(f"status is {self.status!r}, and failure {self.failure!r}")
        if self.rounds > self.settings.protocol.rounds:
            raise ValueError(f"{self.rounds} rounds completed, of {self.settings.protocol.rounds}")
        return self


def write_json(path: Path, content: Config) -> None:
    """Write so that a reader sees the old file or the new one, never half of one.

    Raises ValueError, and writes nothing, where the content would not be read back: a copy with changes is not
    validated when it is made, and JSON has no NaN.
    """
    text = json.dumps(content.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    parse(type(content), text.encode(), f"what was to be written to {path}")
    replace(path, text.encode())


def replace(path: Path, data: bytes) -> None:
    """Write to a temporary file beside ``path``, flush it to the disk, and rename it over.  Raises OSError that names
    ``path``: of the temporary one nobody has heard."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As ``os.walk``, whose inner folders may be cleared to leave them out, and below linked folders too, such as those
    whose place is another disk.  A folder that is reached twice comes once, where it lies or under its first link: the
    run that a link "latest" names is no second run, and a link to a folder above it has an end.  Raises OSError where
    a folder cannot be read; a missing ``top`` holds nothing."""
    known, places = set(), [os.fspath(top)]
    for place in places:  # links are added at its end: what lies here comes first
        for folder, inner, names in os.walk(place, onerror=_unless_gone):
            itself = os.stat(folder)
            if (itself.st_dev, itself.st_ino) in known:
                inner.clear()
                continue
            known.add((itself.st_dev, itself.st_ino))
            yield folder, inner, names
            places += sorted(path for name in inner if os.path.islink(path := os.path.join(folder, name)))


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def parse(kind: type[Kind], text: bytes, where: str) -> Kind:
    """The JSON text as this kind; raises ValueError that says where and which entry is wrong."""
    try:
        found = kind.model_validate_json(text)
        if b"NaN" in text or b"Infinity" in text:  # pydantic reads them as numbers, and nothing here writes them
            json.loads(text, parse_constant=_no_number)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{where} is damaged or of another version: {place}: {first['msg']}") from error
    except _NoNumber as error:
        raise ValueError(f"{where} is damaged or of another version: {error} is no number") from None


class _NoNumber(Exception):
    pass


def _no_number(text: str) -> None:
    raise _NoNumber(text)


def load_settings(folder: Path) -> Settings:
    """The run's settings; raises FileNotFoundError where there are none, ValueError when they are damaged."""
    return parse(Settings, (folder / "settings.json").read_bytes(), str(folder / "settings.json"))


def load_result(folder: Path) -> RunResult:
    """The run's result; raises FileNotFoundError while there is none, ValueError when it is damaged."""
    return parse(RunResult, (folder / "result.json").read_bytes(), str(folder / "result.json"))


def result_of(folder: Path) -> RunResult | None:
    """The run's result, None while there is none; raises ValueError when it is damaged."""
    return load_result(folder) if (folder / "result.json").exists() else None


def result_for(folder: Path, settings: Settings) -> RunResult | None:
    """The result of the run of these settings, None while there is none; raises ValueError, with advice, when it is
    damaged or of another run, as where a folder was copied or renamed, and where settings and records beside it are
    damaged or another's: it would be taken for a run's, and nobody could show or publish it."""
    result = advised(result_of, folder)
    if result is not None and not settings.same_run(result.settings):
        raise ValueError(f"{folder / 'result.json'} is of another run; {_away(folder)}")
    if result is not None:
        advised(lambda folder: rounds_of(folder, result), folder)
    return result


def advised(read: Callable[[Path], Said], folder: Path) -> Said:
    """What a run's folder says of itself; raises ValueError with advice where that is damaged."""
    try:
        return read(folder)
    except ValueError as error:
        raise ValueError(f"{error}; {_away(folder)}") from error


def _away(folder: Path) -> str:
    return f"move {folder} away, or give this run another --out"


def load_records(folder: Path) -> list[RoundRecord]:
    """The finished rounds.  A last line without its end, as a kill leaves it, does not count."""
    path = folder / "records.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [parse(RoundRecord, line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]


def rounds_of(folder: Path, result: RunResult) -> list[RoundRecord]:
    """The rounds that the result of a run's folder tells of.  Raises ValueError where settings.json or records.jsonl is
    missing or damaged, and where one of them contradicts the result."""
    rounds = load_records(folder)
    try:
        settings = load_settings(folder)
    except FileNotFoundError:
        raise ValueError(f"{folder}: settings.json is missing") from None
    if result.rounds > len(rounds):
        raise ValueError(f"{folder}: result.json tells of {result.rounds} rounds, records.jsonl of {len(rounds)}")
    rounds = rounds[: result.rounds]
    if Accuracy.of([record.accuracy for record in rounds]) != result.accuracy:
        raise ValueError(f"{folder}: the accuracies of result.json do not follow from records.jsonl")
    # a failed run's digest also covers the exchanges of the round in which it stopped
    if rounds and rounds[-1].digest != result.digest and result.status == "complete":
        raise ValueError(f"{folder}: the digests of result.json and records.jsonl differ")
    if result.status == "complete" and (strange := _strange(result, rounds)):
        raise ValueError(f"{folder}: what result.json says of {', '.join(strange)} does not follow from records.jsonl")
    if result.settings != settings:
        raise ValueError(f"{folder}: result.json and settings.json describe two runs")
    return rounds


def _strange(result: RunResult, rounds: Sequence[RoundRecord]) -> list[str]:
    """The names of the costs and rates of a complete run that are not those of its rounds."""
    images, seconds = Counter[str](), Counter[str]()
    for record in rounds:
        images.update(record.images)
        seconds.update(record.seconds)
    same = {
        "bytes_up": result.bytes_up == sum(record.bytes_up for record in rounds),
        "bytes_down": result.bytes_down == sum(record.bytes_down for record in rounds),
        "images": Counter(result.images) == images,
        # each of a round's is rounded
        "seconds": all(abs(result.seconds.get(name, 0.0) - value) < 1e-3 for name, value in seconds.items()),
        "peak_memory": result.peak_memory == max((record.peak_memory for record in rounds), default=0),
        "label_noise_after": not rounds or result.label_noise_after == rounds[-1].label_noise,
    }
    return [name for name, holds in same.items() if not holds]
