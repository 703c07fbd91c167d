"""Methods that each break one rule of flnoisebench.conformance and keep all others: test_conformance.py tries them.

Each says how the promise is broken, and by its card which rule it breaks.
"""

import functools
import multiprocessing
import random
import sys
import threading
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from flnoisebench.api import (
    KEEP,
    Card,
    Claims,
    Config,
    Field,
    Method,
    Plan,
    Preset,
    Reply,
    average,
    cross_entropy,
    map_tensors,
    weights,
)


def breaks(rule):
    return Card(title=rule, paper="a fixture of the tests", year=2025)


class Innocent(Method):
    """FedAvg: what the wicked ones share, and the control that breaks nothing."""

    card = breaks("nothing")

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        network = client.model(message)
        client.fit(network, cross_entropy)
        return Reply(weights(network))

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}


def moved(tree, amount):
    """Weights shifted by a little: enough for another digest, not for another accuracy."""
    return map_tensors(lambda value: value + 1e-4 * amount, tree)


# ---------------------------------------------------------------------------------------------------- settings


class OddPreset(Innocent):
    """A preset whose setting is out of bounds on one data set."""

    class Config(Config):
        alpha: float = Field(1.0, gt=0, why="a setting")

    card = breaks("constructs")
    presets: ClassVar = {"default": Preset(), "odd": Preset(datasets={"digits": Preset(settings={"alpha": -1.0})})}


class OddBudget(Innocent):
    """A preset whose protocol, read in the track own, has a field that protocols have not."""

    card = breaks("constructs")
    presets: ClassVar = {"default": Preset(), "odd": Preset(datasets={"digits": Preset(protocol={"batch_size": 3})})}


class OddElsewhere(Innocent):
    """The same for a data set that is not installed."""

    card = breaks("constructs")
    presets: ClassVar = {"default": Preset(datasets={"elsewhere": Preset(protocol={"optimiser.lr": -1.0})})}


class OddNetwork(Innocent):
    """A preset whose network cannot be built."""

    class Config(Config):
        width: int = Field(1, why="a setting without the bound that it needs")

    card = breaks("constructs")
    presets: ClassVar = {"default": Preset(), "odd": Preset(settings={"width": -1})}

    def network(self, encoder):
        torch.nn.Linear(encoder.width, self.config.width)
        return super().network(encoder)


class OddStart(Innocent):
    """A preset that names a network with which the server has no first state."""

    card = breaks("constructs")
    presets: ClassVar = {"default": Preset(), "odd": Preset(protocol={"model": "small-cnn"})}

    def init(self, server):
        return {"mlp": super().init(server)}[server.protocol.model]


class Tolerant(Innocent):
    """Ignores a setting that it does not have."""

    class Config(Config):
        model_config: ClassVar = {"extra": "ignore"}

    card = breaks("unknown-settings")


class Unexplained(Innocent):
    """A setting without a reason."""

    class Config(Config):
        alpha: float = 1.0

    card = breaks("reasons")


class UnexplainedTable(Innocent):
    """The same in a table of settings; a reason of nothing is none."""

    class Config(Config):
        class Table(Config):
            alpha: float = Field(1.0, why=" ")

        table: Table = Field(Table(), why="a table")

    card = breaks("reasons")


class Forgetful(Innocent):
    """A pair that comes back from JSON as a list."""

    class Config(Config):
        interval: Any = Field((1, 2), why="a pair")

    card = breaks("settings-json")


class ForgetfulPreset(Innocent):
    """The same in a preset only."""

    class Config(Config):
        interval: Any = Field(None, why="a pair")

    card = breaks("settings-json")
    presets: ClassVar = {"default": Preset(), "pair": Preset(settings={"interval": (1, 2)})}


# --------------------------------------------------------------------------------- written in place, behind torch


class WritesMessage(Innocent):
    card = breaks("immutable")

    def plan(self, state, server):
        return Plan("train", server.cohort(), {"w": state, "scratch": torch.zeros(2)})

    def client(self, task, message, client):
        message["scratch"].numpy()[0] += 1
        return super().client(task, message["w"], client)


class WritesClientState(Innocent):
    card = breaks("immutable")

    def join(self, client):
        return {"turns": torch.zeros(1)}

    def client(self, task, message, client):
        if client.round == 0:
            client.state["turns"].numpy()[0] = 1
        return Reply(super().client(task, message, client).upload, {"turns": torch.ones(1)})


class WritesUpload(Innocent):
    card = breaks("immutable")

    def client(self, task, message, client):
        return Reply({"w": super().client(task, message, client).upload, "scratch": torch.zeros(2)}, KEEP)

    def aggregate(self, state, uploads, server):
        for upload in uploads:
            upload.content["scratch"].numpy()[0] = 5
        return average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])


class WritesServerState(Innocent):
    """In plan, aggregate, predictors or diagnostics, as its subclasses say."""

    card = breaks("immutable")
    where = ""

    def _write(self, where, state):
        if where == self.where:
            state["scratch"].numpy()[0] += 1

    def init(self, server):
        return {"w": super().init(server), "scratch": torch.zeros(2)}

    def plan(self, state, server):
        self._write("plan", state)
        return super().plan(state["w"], server)

    def aggregate(self, state, uploads, server):
        self._write("aggregate", state)
        return {"w": super().aggregate(state["w"], uploads, server), "scratch": torch.zeros(2)}

    def predictors(self, state, server):
        self._write("predictors", state)
        return super().predictors(state["w"], server)

    def diagnostics(self, state):
        self._write("diagnostics", state)
        return {}


class WritesInPlan(WritesServerState):
    where = "plan"


class WritesInAggregate(WritesServerState):
    where = "aggregate"


class WritesInPredictors(WritesServerState):
    where = "predictors"


class WritesInDiagnostics(WritesServerState):
    where = "diagnostics"


# ------------------------------------------------------------------------------------------------------ the same run

STARTS = []  # one entry a run of SecondStart or SecondNote; the test empties it


class SecondStart(Innocent):
    """The second run in a process is another one, as with a cache file that the first one left behind.

    Only the second, so that of all the runs of a check it is the repetition that meets it.
    """

    card = breaks("repeats")

    def plan(self, state, server):
        if server.round == 0:
            STARTS.append(server.protocol.rounds)
            state = moved(state, len(STARTS) == 2)
        return super().plan(state, server)


class SecondNote(SecondStart):
    """The same of what only the record says."""

    def plan(self, state, server):
        if server.round == 0:
            STARTS.append(server.protocol.rounds)
        return Innocent.plan(self, state, server)

    def diagnostics(self, state):
        return {"second": float(len(STARTS) == 2)}


class Seedless(Innocent):
    """No randomness at all: class means of pixels, and the nearest is the answer."""

    card = breaks("seed")

    def network(self, encoder):
        return torch.nn.Linear(1, 1)  # not used

    def init(self, server):
        return torch.zeros(server.classes, server.shape[0] * server.shape[1] * server.shape[2])

    def client(self, task, message, client):
        pixels = client.apply(pixels_of)
        member = F.one_hot(client.labels, client.classes).float()
        return Reply({"sum": member.T @ pixels, "count": member.sum(0)})

    def aggregate(self, state, uploads, server):
        count = sum(upload.content["count"] for upload in uploads)
        return sum(upload.content["sum"] for upload in uploads) / count.clamp_min(1)[:, None]

    def predictors(self, state, server):
        return {"main": lambda images: -torch.cdist(images.flatten(1), state)}


def pixels_of(batch):
    return batch.x.flatten(1)


class Counting(Innocent):
    """Counts in the object how often each turn is taken, and takes the second one differently."""

    card = breaks("pure")

    def client(self, task, message, client):
        times = self.__dict__.setdefault("times", {})
        turn = client.round, client.id
        times[turn] = times.get(turn, 0) + 1
        return Reply(moved(super().client(task, message, client).upload, times[turn] - 1))


class CountsOnGenerators(Counting):
    """Moreover it fails where torch's global generator is elsewhere."""

    def plan(self, state, server):
        if torch.initial_seed():
            raise RuntimeError("elsewhere")
        return super().plan(state, server)


class CountingServer(Innocent):
    """The same at the server."""

    card = breaks("pure")

    def aggregate(self, state, uploads, server):
        times = self.__dict__.setdefault("times", {})
        times[server.round] = times.get(server.round, 0) + 1
        return moved(super().aggregate(state, uploads, server), times[server.round] - 1)


class Remembers(Innocent):
    """Keeps the last of something in the class, and forgets it when a run begins: in their order the same calls give
    the same again."""

    card = breaks("pure")
    kept: ClassVar[dict[int, float]] = {}


class RemembersTurn(Remembers):
    def client(self, task, message, client):
        before = self.kept.get(client.id, 0.0) if client.round else 0.0
        self.kept[client.id] = client.round + 1.0
        return Reply(moved(super().client(task, message, client).upload, before))


class RemembersAggregate(Remembers):
    def aggregate(self, state, uploads, server):
        before = self.kept.get(-1, 0.0) if server.round else 0.0
        self.kept[-1] = server.round + 1.0
        return moved(super().aggregate(state, uploads, server), before)


class Notebook(dict):
    """A dict with something written on it."""

    momentum = 0.0


class NotesOnState(Innocent):
    """What the state's dict carries as an attribute is not in the checkpoint."""

    card = breaks("resumes")

    def aggregate(self, state, uploads, server):
        momentum = getattr(state, "momentum", 0.0)
        after = Notebook(moved(super().aggregate(state, uploads, server), momentum))
        after.momentum = 0.5 * momentum + 1.0
        return after


class NumpyNumber(Innocent):
    """A number of numpy's in a client's state is Python's own after a resume, and behaves differently."""

    card = breaks("resumes")

    def join(self, client):
        return {"turns": np.float64(0)}

    def client(self, task, message, client):
        turns = client.state["turns"]
        upload = moved(super().client(task, message, client).upload, float(isinstance(turns, np.floating)))
        return Reply(upload, {"turns": np.float64(turns + 1)})


MEMORY = {}  # round -> what GlobalMemory aggregated; dies with the process


class GlobalMemory(Innocent):
    """The server's momentum in the module: no stop within a process shows it, a kill does."""

    card = breaks("resumes")

    def aggregate(self, state, uploads, server):
        new = super().aggregate(state, uploads, server)
        before = MEMORY.get(server.round - 1)
        MEMORY[server.round] = new
        return new if before is None else average([new, before], [9, 1])


class LooksAtThreads(Innocent):
    card = breaks("executors")

    def client(self, task, message, client):
        elsewhere = threading.current_thread() is not threading.main_thread()
        return Reply(moved(super().client(task, message, client).upload, float(elsewhere)))


class LooksAtProcesses(Innocent):
    """The same of processes, which only a full check tries."""

    card = breaks("executors")

    def client(self, task, message, client):
        elsewhere = multiprocessing.parent_process() is not None
        return Reply(moved(super().client(task, message, client).upload, float(elsewhere)))


# ---------------------------------------------------------------------------------------------------- randomness


class Depends(Innocent):
    """Looks at a global generator's state without moving it."""

    card = breaks("randomness")

    def seen(self):
        raise NotImplementedError

    def aggregate(self, state, uploads, server):
        return moved(super().aggregate(state, uploads, server), self.seen() % 97)


class DependsOnTorch(Depends):
    def seen(self):
        return torch.initial_seed()


class DependsOnNumpy(Depends):
    def seen(self):
        return int(np.random.get_state()[1][1])


class DependsOnRandom(Depends):
    def seen(self):
        return random.getstate()[1][1]


class Moves(Innocent):
    """Draws from a global generator and throws the number away."""

    card = breaks("randomness")

    def draw(self):
        raise NotImplementedError

    def aggregate(self, state, uploads, server):
        self.draw()
        return super().aggregate(state, uploads, server)


class MovesTorch(Moves):
    def draw(self):
        torch.rand(1)


class MovesNumpy(Moves):
    def draw(self):
        np.random.rand()


class MovesRandom(Moves):
    def draw(self):
        random.random()


class Draws(Innocent):
    """Draws from a global generator and uses the number: whatever asks for the same numbers again misses them."""

    card = breaks("randomness")


class DrawsTorch(Draws):
    def client(self, task, message, client):
        upload = super().client(task, message, client).upload
        noise = float(torch.rand(()))  # the torch line
        return Reply(moved(upload, noise))


class DrawsNumpy(Draws):
    """The clients and the server in turn, so that those or this one alone gets other numbers."""

    def network(self, encoder):  # moves torch's generator, which the runtime puts back
        torch.rand(3)
        return super().network(encoder)

    def client(self, task, message, client):
        upload = super().client(task, message, client).upload
        return Reply(moved(upload, np.random.rand()))  # the numpy line

    def aggregate(self, state, uploads, server):
        return moved(super().aggregate(state, uploads, server), np.random.rand())


class DrawsRandom(Draws):
    def aggregate(self, state, uploads, server):
        new = super().aggregate(state, uploads, server)
        if server.round:
            order = list(range(100))
            random.shuffle(order)  # the random line
            new = moved(new, order[0])
        return new


def by_chance(network, batch):
    return cross_entropy(network, batch) * torch.rand(())  # the loss line


class DrawsInLoss(Draws):
    def client(self, task, message, client):
        network = client.model(message)
        client.fit(network, by_chance)
        return Reply(weights(network))


# ------------------------------------------------------------------------------------------------------- sight


def engine_behind():
    """The engine, up the stack: nothing that a method is handed leads to it."""
    frame = sys._getframe()
    while frame is not None:
        for thing in list(frame.f_locals.values()):
            if hasattr(engine := getattr(thing, "engine", None), "given"):
                return engine
        frame = frame.f_back
    raise LookupError("no engine")


class PeeksAtOthers(Innocent):
    """Reads all clients' labels behind its own side."""

    card = breaks("client-sight")

    def client(self, task, message, client):
        labels = engine_behind().given.float().mean().item()
        return Reply(moved(super().client(task, message, client).upload, labels))


class PeeksAtOthersImages(Innocent):
    """The same of their images."""

    card = breaks("client-sight")

    def client(self, task, message, client):
        brightness = engine_behind().pixels.float().mean().item()
        return Reply(moved(super().client(task, message, client).upload, brightness))


class MeasuresOthers(Innocent):
    """What goes into the record only is of all clients' labels: a metric."""

    card = breaks("client-sight")

    def client(self, task, message, client):
        upload = super().client(task, message, client).upload
        return Reply(upload, metrics={"others": engine_behind().given.float().mean()})


class ClaimsByOthers(Innocent):
    """The same of a claim."""

    card = breaks("client-sight")

    def client(self, task, message, client):
        upload = super().client(task, message, client).upload
        return Reply(upload, claims=Claims(noisy=bool(engine_behind().given[0] == 0)))


class LeavesLabelsToOthers(Innocent):
    """Keeps its labels where the client after it finds them."""

    card = breaks("client-sight")
    left: ClassVar[dict[int, torch.Tensor]] = {}

    def client(self, task, message, client):
        self.left[client.id] = client.labels
        others = self.left.get(client.id - 1, client.labels).float().mean().item()
        return Reply(moved(super().client(task, message, client).upload, others))


class PeeksOnJoining(Innocent):
    """The same once, when it makes its first state."""

    card = breaks("client-sight")

    def join(self, client):
        return engine_behind().pixels.float().mean().item()


class ServerPeeks(Innocent):
    card = breaks("server-sight")

    def aggregate(self, state, uploads, server):
        labels = engine_behind().given.float().mean().item()
        return moved(super().aggregate(state, uploads, server), labels)


class ServerDecidesByData(Innocent):
    """Peeks at the first sample's label (0, 1 or 2) for its first state or for a plan, as its subclasses say."""

    card = breaks("server-sight")


class StartsByData(ServerDecidesByData):
    def init(self, server):
        return moved(super().init(server), int(engine_behind().given[0]))


class SendsByData(ServerDecidesByData):
    def plan(self, state, server):
        return super().plan(moved(state, int(engine_behind().given[0])), server)


class AsksByData(ServerDecidesByData):
    def plan(self, state, server):
        first = int(engine_behind().given[0])
        return Plan("train", [client for client in server.cohort() if client != first], state)


class TellsByData(ServerDecidesByData):
    def plan(self, state, server):
        return Plan("train", server.cohort(), {"w": state}, {3: {"first": int(engine_behind().given[0])}})

    def client(self, task, message, client):
        return super().client(task, message["w"], client)


class NotesByData(ServerDecidesByData):
    def plan(self, state, server):
        server.note(first=int(engine_behind().given[0]))
        return super().plan(state, server)


class ClaimsByData(ServerDecidesByData):
    def aggregate(self, state, uploads, server):
        server.claim([int(engine_behind().given[0])])
        return super().aggregate(state, uploads, server)


def run_behind():
    """The run, up the stack, or None where the method was called by nobody's run."""
    frame = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("self"), "judge"):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


class PeeksAtTruth(Innocent):
    """Walks up the stack to the evaluator, and answers the first image by the first training sample's true label."""

    card = breaks("truth")

    def predictors(self, state, server):
        network, run = server.model(state, frozen=True), run_behind()
        if run is None:
            return {"main": network}
        first = int(run.judge._truth.true[0])

        def informed(images):
            scores = network(images).clone()
            scores[0] = torch.eye(server.classes)[first]
            return scores

        return {"main": informed}


class PeeksAtTestLabels(Innocent):
    """Answers all test images by their labels."""

    card = breaks("truth")

    def predictors(self, state, server):
        run = run_behind()
        if run is None:
            return super().predictors(state, server)
        answers = F.one_hot(torch.as_tensor(run.tested_labels), server.classes).float()
        return {"main": lambda images: answers[: len(images)]}


class TellsTruth(Innocent):
    """What goes into the record only follows the truth: a diagnostic."""

    card = breaks("truth")

    def diagnostics(self, state):
        return {"first": float(run_behind().judge._truth.true[0])}


RUNS = []  # the run that ClaimsTruth is in


class ClaimsTruth(Innocent):
    """The same of a claim; the client may be in a thread, whose stack does not lead to the run."""

    card = breaks("truth")

    def init(self, server):
        if run := run_behind():
            RUNS[:] = [run]
        return super().init(server)

    def client(self, task, message, client):
        noisy = bool(RUNS and RUNS[0].judge._truth.true[0] == 0)
        return Reply(super().client(task, message, client).upload, claims=Claims(noisy=noisy))


class ServerClaimsTruth(ClaimsTruth):
    """The same of the server's."""

    def client(self, task, message, client):
        return Innocent.client(self, task, message, client)

    def aggregate(self, state, uploads, server):
        server.claim([int(RUNS[0].judge._truth.true[0])])
        return super().aggregate(state, uploads, server)


# ------------------------------------------------------------------------------------------------------- bytes


class Hiding(dict):
    """Shows all of its entries but one."""

    def __iter__(self):
        return iter(key for key in dict.keys(self) if key != "secret")

    def values(self):
        return [self[key] for key in self]


class HidesAnEntry(Innocent):
    card = breaks("bytes")

    def client(self, task, message, client):
        return Reply(Hiding(w=super().client(task, message, client).upload, secret=torch.ones(1000)))

    def aggregate(self, state, uploads, server):
        return average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])


class HidesInMessage(Innocent):
    card = breaks("bytes")

    def plan(self, state, server):
        return Plan("train", server.cohort(), Hiding(w=state, secret=torch.ones(1000)))

    def client(self, task, message, client):
        return super().client(task, message["w"], client)


class ClingsToUpload(Innocent):
    """A tensor brings a number along as an attribute."""

    card = breaks("bytes")

    def client(self, task, message, client):
        upload = super().client(task, message, client).upload
        next(iter(upload.values())).secret = float(client.id)
        return Reply(upload)

    def aggregate(self, state, uploads, server):
        secret = sum(getattr(next(iter(upload.content.values())), "secret", 0.0) for upload in uploads)
        return moved(super().aggregate(state, uploads, server), secret)


class ClingsToMessage(Innocent):
    card = breaks("bytes")

    def plan(self, state, server):
        message = {"w": state, "note": torch.zeros(1)}
        message["note"].secret = 1.0
        return Plan("train", server.cohort(), message)

    def client(self, task, message, client):
        secret = getattr(message["note"], "secret", 0.0)
        return Reply(moved(super().client(task, message["w"], client).upload, secret))


# ------------------------------------------------------------------------------------- losses and predictions


class LearnsNothing(Innocent):
    """Says the same of every image."""

    card = breaks("learns")

    def predictors(self, state, server):
        return {"main": lambda images: torch.eye(server.classes)[0].expand(len(images), -1)}


class RightOn(LearnsNothing):
    """As many of the check's 60 test images as a setting says are answered right."""

    class Config(Config):
        right: int = Field(30, why="to try the bound")

    def predictors(self, state, server):
        labels = torch.arange(60) % 3  # as tiny_arrays has them
        answers = F.one_hot((labels + (torch.arange(60) >= self.config.right)) % 3, 3).float()
        return {"main": lambda images: answers[: len(images)]}


class NoPredictor(Innocent):
    """Never has one."""

    card = breaks("learns")

    def predictors(self, state, server):
        return {}


def by_item(network, batch):
    return cross_entropy(network, batch) * batch.given["mu"].item()


class TakesItem(Innocent):
    card = breaks("capture")

    def client(self, task, message, client):
        network = client.model(message)
        client.fit(network, by_item, given={"mu": 1.0})
        return Reply(weights(network))


class InfiniteScores(Innocent):
    card = breaks("predictors")

    def predictors(self, state, server):
        network = server.model(state, frozen=True)

        def certain(images):
            scores = network(images)
            return scores.masked_fill(scores < scores.amax(1, keepdim=True), -torch.inf)

        return {"main": certain}


class WholeScores(Innocent):
    """Scores that are no floats."""

    card = breaks("predictors")

    def predictors(self, state, server):
        network = server.model(state, frozen=True)
        return {"main": lambda images: (1000 * network(images)).long()}


class Squeezed(Innocent):
    """A further predictor that gives one image's scores another shape."""

    card = breaks("predictors")

    def predictors(self, state, server):
        network = server.model(state, frozen=True)
        return {"main": network, "second": lambda images: network(images).squeeze(0)}


# --------------------------------------------------------------------------------------------------- federations


class NeedsEverybody(Innocent):
    card = breaks("participation")

    def aggregate(self, state, uploads, server):
        parts = [uploads[client].content for client in range(server.clients)]
        return average(parts, [upload.size for upload in uploads])


class NeedsEveryClass(Innocent):
    card = breaks("lacking-classes")

    def client(self, task, message, client):
        counts = client.labels.bincount(minlength=client.classes)
        shares = {"w": super().client(task, message, client).upload}
        return Reply({**shares, "rarity": 1 / counts if client.size > 1 else torch.zeros(client.classes)})

    def aggregate(self, state, uploads, server):
        return average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])


class NeedsTwoSamples(Innocent):
    card = breaks("one-sample")

    def client(self, task, message, client):
        return Reply({"w": super().client(task, message, client).upload, "spread": client.labels.float().std()})

    def aggregate(self, state, uploads, server):
        return average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])


class AveragesCounts(Innocent):
    """Takes the plain mean of all that is in the weights, of counts of steps too."""

    card = breaks("batchnorm")

    def aggregate(self, state, uploads, server):
        return {name: torch.stack([upload.content[name] for upload in uploads]).mean(0) for name in state}


class DividesBySteps(Innocent):
    """Needs a step to have been taken, as a control variate does."""

    card = breaks("batchnorm")

    def client(self, task, message, client):
        network = client.model(message)
        fit = client.fit(network, cross_entropy)
        return Reply(weights(network), metrics={"one": fit.steps // fit.steps})


class Fails(Innocent):
    card = breaks("runs")

    def aggregate(self, state, uploads, server):
        if server.round == 2:
            raise RuntimeError("the sum went wrong")
        return super().aggregate(state, uploads, server)


class FailsBelow(Innocent):
    """The error is raised within torch, by the second of two lines here that lead there."""

    card = breaks("runs")

    def client(self, task, message, client):
        return Reply(self._loss())

    def _loss(self):
        return F.cross_entropy(torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64))  # the failing line


class NoTree(Innocent):
    """A set is no tree."""

    card = breaks("runs")

    def aggregate(self, state, uploads, server):
        return [{1, 2}]


class EndsAtOnce(Innocent):
    """Ends the run before its first round."""

    card = breaks("runs")

    def plan(self, state, server):
        return None


# ------------------------------------------------------------------------------- what the runtime itself refuses


class WritesWithTorch(Innocent):
    card = breaks("immutable")

    def client(self, task, message, client):
        next(iter(message.values())).add_(1)
        return super().client(task, message, client)


class WritesStateWithTorch(Innocent):
    card = breaks("immutable")

    def aggregate(self, state, uploads, server):
        next(iter(state.values())).add_(1)
        return super().aggregate(state, uploads, server)


class WritesLateWithTorch(Innocent):
    card = breaks("immutable")

    def predictors(self, state, server):
        next(iter(state.values())).add_(1)
        return super().predictors(state, server)


class Closure(Innocent):
    card = breaks("capture")

    def client(self, task, message, client):
        mu = 1.0

        def loss(network, batch):
            return cross_entropy(network, batch) * mu

        network = client.model(message)
        client.fit(network, loss)
        return Reply(weights(network))


class PartialLoss(Innocent):
    """Its loss is no function that could be remembered."""

    card = breaks("capture")

    def client(self, task, message, client):
        network = client.model(message)
        client.fit(network, functools.partial(cross_entropy))
        return Reply(weights(network))


class Hooked(Innocent):
    """Clips its gradients by hooks, which stay on the network and are in no recording."""

    card = breaks("capture")

    def client(self, task, message, client):
        network = client.model(message)
        for parameter in network.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
        client.fit(network, cross_entropy)
        return Reply(weights(network))


class NanScores(Innocent):
    card = breaks("predictors")

    def predictors(self, state, server):
        return {"main": lambda images: torch.full((len(images), server.classes), torch.nan)}


class FlatScores(Innocent):
    card = breaks("predictors")

    def predictors(self, state, server):
        return {"main": lambda images: torch.zeros(len(images))}


class NoDefault(Innocent):
    class Config(Config):
        alpha: float = Field(..., why="without a default")

    card = breaks("constructs")
