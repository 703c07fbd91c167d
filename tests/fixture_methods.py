"""One tiny method a need that the real methods have, each an ordinary plugin: test_plugin_needs.py runs them all."""

import copy
import threading
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from flnoisebench.api import (
    Card,
    Claims,
    Config,
    Field,
    Method,
    Optimiser,
    Plan,
    Reply,
    average,
    cross_entropy,
    map_tensors,
    weights,
)


def card(title, *conditions, told=()):
    return Card(title=title, paper="a fixture of the tests", year=2025, conditions=conditions, told=told)


class Averaging(Method):
    """What most fixtures share: FedAvg with the loss and the arguments of ``fit`` left open."""

    card = card("averaging")

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        network = client.model(message)
        fit = self.train(network, message, client)
        return Reply(weights(network), metrics={"loss": fit.loss})

    def train(self, network, message, client):
        return client.fit(network, cross_entropy)

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}


# ------------------------------------------------------------------------------ exchanges: FedCova and FedCorr


class TwoExchanges(Averaging):
    """A round of two exchanges, as FedCova's correction: a score comes up, private flags go down with the weights.

    On the wire, each round: 4 int32 down to everybody, one number up; then the weights, and for the two clients with
    the highest scores a flag and 5 float32; the weights up.
    """

    card = card("two exchanges")

    def init(self, server):
        return {"w": weights(server.model()), "chosen": None}

    def plan(self, state, server):
        everybody = range(server.clients)
        if state["chosen"] is None:
            return Plan("score", everybody, torch.arange(4, dtype=torch.int32), closes_round=False)
        private = {client: {"flag": True, "extra": torch.full((5,), float(client))} for client in state["chosen"]}
        return Plan("train", everybody, {"w": state["w"]}, private)

    def client(self, task, message, client):
        if task == "score":
            return Reply(float(client.id))
        network = client.model(message["w"])
        epochs = 2 if message.get("flag") else 1
        fit = client.fit(network, cross_entropy, epochs=epochs)
        told = float(message["extra"].sum()) if "extra" in message else -1.0
        return Reply(weights(network), metrics={"loss": fit.loss, "told": told})

    def aggregate(self, state, uploads, server):
        if state["chosen"] is None:
            ranked = sorted(uploads, key=lambda upload: -upload.content)
            return {**state, "chosen": sorted(upload.client for upload in ranked[:2])}
        return {"w": super().aggregate(None, uploads, server), "chosen": None}

    def predictors(self, state, server):
        return {"main": server.model(state["w"], frozen=True)}


class Sweep(Averaging):
    """FedCorr's sweep: one client after the other in the order 2, 0, 1, the model and a number passing through, then
    an exchange of all that closes the round.  Client k adds k + 1 to the number: 3, 4, 6."""

    card = card("sequential sweep")
    order = (2, 0, 1)

    def init(self, server):
        return {"w": weights(server.model()), "turn": 0, "x": 0, "seen": []}

    def plan(self, state, server):
        if state["turn"] < len(self.order):
            return Plan("pass", [self.order[state["turn"]]], {"w": state["w"], "x": state["x"]}, closes_round=False)
        return Plan("relabel", range(server.clients), {"w": state["w"]})

    def join(self, client):
        return {"labels": client.labels}

    def client(self, task, message, client):
        network = client.model(message["w"], frozen=task == "relabel")
        if task == "pass":
            client.fit(network, cross_entropy, labels=client.state["labels"])
            return Reply({"w": weights(network), "x": message["x"] + client.id + 1})
        scores = client.apply(guess, frozen={"net": network})
        labels = scores.argmax(1)
        return Reply(None, {"labels": labels}, claims=Claims(labels=labels))

    def aggregate(self, state, uploads, server):
        if state["turn"] == len(self.order):
            server.note(seen=state["seen"])
            return {**state, "turn": 0, "x": 0, "seen": []}
        (upload,) = uploads
        x = upload.content["x"]
        return {"w": upload.content["w"], "turn": state["turn"] + 1, "x": x, "seen": [*state["seen"], x]}

    def predictors(self, state, server):
        return {"main": server.model(state["w"], frozen=True)}


def guess(batch):
    return batch.frozen["net"](batch.x)


# ------------------------------------------------------------------------------------- what a step may look at


class Centroids(Averaging):
    """RoFL's need: a carry that every step updates and that comes back, here each class's sum and count of images."""

    card = card("carry")

    def init(self, server):
        pixels = server.shape[0] * server.shape[1] * server.shape[2]
        return {"w": weights(server.model()), "sum": torch.zeros(server.classes, pixels)}

    def client(self, task, message, client):
        network = client.model(message["w"])
        zero = {"sum": torch.zeros_like(message["sum"]), "count": torch.zeros(client.classes)}
        fit = client.fit(network, centroid_loss, carry=zero)
        return Reply({"w": weights(network), **fit.carry})

    def aggregate(self, state, uploads, server):
        parts = [upload.content for upload in uploads]
        mean = average([part["w"] for part in parts], [upload.size for upload in uploads])
        server.note(count=sum(part["count"] for part in parts).tolist())
        return {"w": mean, "sum": sum(part["sum"] for part in parts)}

    def predictors(self, state, server):
        return {"main": server.model(state["w"], frozen=True)}


def centroid_loss(network, batch):
    member = F.one_hot(batch.y, batch.carry["count"].shape[0]).float()
    carry = {
        "sum": batch.carry["sum"] + member.T @ batch.x.flatten(1),
        "count": batch.carry["count"] + member.sum(0),
    }
    return F.cross_entropy(network(batch.x), batch.y), carry


class Distilled(Averaging):
    """A frozen teacher: every client stays near the received model, with a weight that ramps over the rounds."""

    card = card("frozen teacher, changing scalar")

    def train(self, network, message, client):
        teacher = client.model(message, "teacher", frozen=True)
        ramp = client.round / client.protocol.rounds  # 0, 1/3, 2/3
        return client.fit(network, distilled, frozen={"teacher": teacher}, given={"ramp": ramp, "t": 2})


def distilled(network, batch):
    student, teacher = network(batch.x), batch.frozen["teacher"](batch.x)
    t = batch.given["t"]
    near = F.kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="batchmean")
    return F.cross_entropy(student, batch.y) + batch.given["ramp"] * near


class Steered(Averaging):
    """A gradient of the method's own: clipped to a norm, with a momentum that outlives the turn (FedAvg keeps none), in
    steps of the plain optimiser."""

    card = card("own gradient")

    def join(self, client):
        return {name: torch.zeros_like(value) for name, value in client.model().named_parameters()}

    def client(self, task, message, client):
        network = client.model(message)
        budget = client.protocol.optimiser_at(client.round)
        plain = budget.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
        given = {"momentum": budget.momentum, "norm": 1.0}
        fit = client.fit(network, steered, given=given, carry=client.state, optimiser=plain)
        return Reply(weights(network), fit.carry, metrics={"loss": fit.loss})


def steered(network, batch):
    value = F.cross_entropy(network(batch.x), batch.y)
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(value, list(parameters.values()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    scale = (batch.given["norm"] / norm).clamp(max=1)
    moved = {
        name: batch.given["momentum"] * batch.carry[name] + scale * g
        for name, g in zip(parameters, gradients, strict=True)
    }
    linear = sum((p * moved[name].detach()).sum() for name, p in parameters.items())
    return value.detach() + linear - linear.detach(), moved


class TwoStreams(Averaging):
    """DivideMix's need: labelled and unlabelled halves, the second cycling by itself, with two views of each image."""

    card = card("two batch streams")

    def train(self, network, message, client):
        half = client.size // 2
        return client.fit(
            network,
            halves,
            subset=torch.arange(half),
            streams={"unlabelled": {"subset": torch.arange(half, client.size), "views": 2, "batch": 4}},
            given={"weight": 0.5},
        )


def halves(network, batch):
    other = batch.other["unlabelled"]
    one, two = (network(view).softmax(1) for view in other.views)
    return F.cross_entropy(network(batch.x), batch.y) + batch.given["weight"] * (one - two.detach()).square().mean()


class Pair(Averaging):
    """Co-teaching: two networks in one; each learns from the images on which the other's loss is small."""

    card = card("pair of networks", "a second model")

    def network(self, encoder):
        first = super().network(encoder)
        second = copy.deepcopy(first)
        for module in second.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return torch.nn.ModuleList([first, second])

    def train(self, network, message, client):
        keep = 1 - 0.3 * min(1.0, client.round / 2)
        return client.fit(network, exchanged, given={"keep": keep})

    def predictors(self, state, server):
        first, second = server.model(state, frozen=True)
        return {"main": first, "second": second}


def exchanged(pair, batch):
    losses = [F.cross_entropy(network(batch.x), batch.y, reduction="none") for network in pair]
    kept = (batch.given["keep"] * len(batch.y)).floor()
    # a sample's rank among its batch, instead of a selection whose size would be frozen into the step
    chosen = [(loss.detach().argsort().argsort() < kept).float() for loss in losses]
    return sum((loss * mask).sum() / mask.sum() for loss, mask in zip(losses, reversed(chosen), strict=True))


class Remembering(Averaging):
    """Per-sample values that the loss writes and the client keeps: how often each sample was trained on."""

    card = card("per-sample values")

    def join(self, client):
        return {"times": torch.zeros(client.size, dtype=torch.int32), "turns": 0}

    def client(self, task, message, client):
        network = client.model(message)
        fit = client.fit(network, counting, sample={"times": client.state["times"]})
        state = {"times": fit.sample["times"], "turns": client.state["turns"] + 1}
        times = state["times"].double()
        return Reply(
            weights(network),
            state,
            metrics={"fewest": times.min().item(), "most": times.max().item(), "turns": state["turns"]},
            claims=Claims(clean=(times > 0).double(), noisy=client.id == 0),
        )


def counting(network, batch):
    loss = F.cross_entropy(network(batch.x), batch.y)
    return loss, None, {"times": batch.sample["times"] + 1}


class Masked(Averaging):
    """Pre-drawn randomness: mixup with weights and partners drawn before the epoch, and dropped-out pixels."""

    card = card("pre-drawn masks")

    def train(self, network, message, client):
        rng, sizes = client.rng("mixup"), client.batch_sizes() or (1,)  # nothing, for a lone sample under BatchNorm
        draw = {
            "weight": torch.rand(len(sizes), generator=rng),
            "mask": (torch.rand(len(sizes), max(sizes), 1, 8, 8, generator=rng) < 0.9).float(),
            "shift": torch.randint(max(sizes), (len(sizes),), generator=rng),
        }
        return client.fit(network, mixed, draw=draw)


def mixed(network, batch):
    b = len(batch.y)
    partner = (torch.arange(b, device=batch.y.device) + batch.draw["shift"]) % b
    x = batch.x * batch.draw["mask"][:b]
    w = batch.draw["weight"]
    x = w * x + (1 - w) * x.index_select(0, partner)
    scores = network(x)
    return w * F.cross_entropy(scores, batch.y) + (1 - w) * F.cross_entropy(scores, batch.y.index_select(0, partner))


# --------------------------------------------------------------------------- the server's side, and what it says


class PublicTraining(Averaging):
    """FedNed's need: the server distils the clients' mean prediction into its model, on public images, with Adam."""

    card = card("server-side training", "public images")

    def aggregate(self, state, uploads, server):
        mean = super().aggregate(state, uploads, server)
        target = 0
        for upload in uploads:
            teacher = server.model(upload.content, f"teacher {upload.client}", frozen=True)
            stream = f"view {upload.client}"
            seen = server.apply(guess, data=server.public, frozen={"net": teacher}, view="train", stream=stream)
            target = target + seen.softmax(1) / len(uploads)
        network = server.model(mean)
        optimiser = Optimiser(name="adam", lr=1e-3, weight_decay=0.0)
        fit = server.fit(network, cross_entropy, data=server.public, labels=target, steps=7, optimiser=optimiser)
        server.note(steps=fit.steps, distillation=fit.loss)
        return weights(network)


class Claiming(Averaging):
    """Partial participation with client states, claims by clients and by the server, and facts told by the card."""

    card = card("claims", told=("noise_rate", "noisy_clients"))

    def join(self, client):
        return {"rounds": []}

    def client(self, task, message, client):
        network = client.model(message)
        fit = client.fit(network, cross_entropy)
        state = {"rounds": [*client.state["rounds"], client.round]}
        clean = torch.linspace(0, 1, client.size)
        claims = Claims(labels=(client.labels + 1) % client.classes, clean=clean, noisy=client.id % 2 == 0)
        return Reply(weights(network), state, {"loss": fit.loss, "turns": len(state["rounds"])}, claims)

    def aggregate(self, state, uploads, server):
        if server.round == 1:  # it stands from then on
            server.claim([1])
        server.note(cohort=[upload.client for upload in uploads], rate=server.told["noise_rate"], word="no", flag=True)
        return super().aggregate(state, uploads, server)

    def diagnostics(self, state):
        return {"norm": float(sum(value.double().square().sum() for value in state.values()))}


class Speaking(Averaging):
    """What a server says with its plan and in round 1 once more, and clients that say how many samples they have, and
    of their labels something in round 0 and something else later."""

    card = card("speaking")

    def plan(self, state, server):
        server.claim([0])
        server.note(planned=server.round)
        return super().plan(state, server)

    def client(self, task, message, client):
        claims = Claims(labels=client.labels) if client.round else Claims(clean=torch.zeros(client.size))
        return Reply(super().client(task, message, client).upload, metrics={"size": client.size}, claims=claims)

    def aggregate(self, state, uploads, server):
        if server.round == 1:
            server.claim([0, 1])
            server.note(planned="more")
        return super().aggregate(state, uploads, server)


class Laid(Averaging):
    """Tensors that lie in memory in another order, or with gaps: the last bits of a sum over them depend on it."""

    card = card("laid")

    def init(self, server):
        values = torch.rand(64, 50, generator=server.rng("values"))
        return {"w": weights(server.model()), "turned": values.t(), "gaps": values[:, :33], "sums": []}

    def plan(self, state, server):
        return Plan("train", server.cohort(), {name: state[name] for name in ("w", "turned", "gaps")})

    def client(self, task, message, client):
        reply = super().client(task, message["w"], client)
        return Reply({"w": reply.upload, "sum": message["turned"].sum() + message["gaps"].sum()})

    def aggregate(self, state, uploads, server):
        w = average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])
        sums = [uploads[0].content["sum"], state["turned"].sum(), state["gaps"].sum()]
        return {**state, "w": w, "sums": sums}

    def predictors(self, state, server):
        return super().predictors(state["w"], server)


class Whole(Averaging):
    """A bit of everything that a commit must hold: two exchanges, cohorts, client states, claims, metrics, notes."""

    card = card("whole")

    def init(self, server):
        return {"w": weights(server.model()), "cohort": None}

    def plan(self, state, server):
        if state["cohort"] is None:
            return Plan("ask", server.cohort(), None, closes_round=False)
        return Plan("train", state["cohort"], {"w": state["w"]}, {state["cohort"][0]: {"first": "zählt"}})

    def join(self, client):
        return {"times": torch.zeros(client.size), "asked": 0}

    def client(self, task, message, client):
        if task == "ask":
            state = {**client.state, "asked": client.state["asked"] + 1}
            return Reply(state["asked"], state, metrics={"asked": state["asked"]})
        network = client.model(message["w"])
        fit = client.fit(network, counting, sample={"times": client.state["times"]})
        state = {**client.state, "times": fit.sample["times"]}
        noise = 0.01 * torch.randn(1, generator=client.rng("noise")).item()
        claims = Claims(clean=(state["times"] > 1).float(), noisy="first" in message)
        return Reply({"w": weights(network), "noise": noise}, state, {"loss": fit.loss, "noise": noise}, claims)

    def aggregate(self, state, uploads, server):
        if state["cohort"] is None:
            server.note(asked=[upload.content for upload in uploads])
            return {**state, "cohort": [upload.client for upload in uploads]}
        server.claim(state["cohort"][:1])
        w = average([upload.content["w"] for upload in uploads], [upload.size for upload in uploads])
        return {"w": map_tensors(lambda value: value + uploads[0].content["noise"], w), "cohort": None}

    def predictors(self, state, server):
        return {"main": server.model(state["w"], frozen=True)}


# ------------------------------------------------------------------------------------------ for the guarantees


class Drawing(Averaging):
    """FedAvg that also draws numbers it does not use: nobody else's may shift."""

    class Config(Config):
        extra: int = Field(0, ge=0, why="how many needless draws a turn")

    card = card("drawing")

    def client(self, task, message, client):
        for i in range(self.config.extra):
            torch.rand(1000, generator=client.rng(f"needless {i}"))
            client.seed(f"needless {i}")
            client.model(None, f"needless {i}")
        return super().client(task, message, client)

    def aggregate(self, state, uploads, server):
        for i in range(self.config.extra):
            torch.rand(10, generator=server.rng(f"needless {i}"))
        return super().aggregate(state, uploads, server)


class Norm(Averaging):
    """FedAvg of a network with BatchNorm."""

    card = card("batchnorm")

    def network(self, encoder):
        return torch.nn.Sequential(
            encoder, torch.nn.BatchNorm1d(encoder.width), torch.nn.Linear(encoder.width, encoder.classes)
        )


MEETING = threading.Barrier(2)


class Meeting(Averaging):
    """Clients meet inside the loss: a client that is alone in there waits in vain, and the run fails."""

    card = card("meeting")

    def train(self, network, message, client):
        return client.fit(network, meeting, epochs=1)


def meeting(network, batch):
    if not batch.step:
        MEETING.wait(timeout=60)
    return F.cross_entropy(network(batch.x), batch.y)


class Faulty(Averaging):
    """Goes wrong in one way, in round 1, at client 1 (or at the server), as long as the file ``mended`` is missing."""

    class Config(Config):
        how: str = Field(why="which way")
        mended: str = Field(why="a path; once it exists nothing goes wrong any more")

    card = card("faulty")

    def _bad(self, side, *hows):
        return side.round == 1 and self.config.how in hows and not Path(self.config.mended).exists()

    def plan(self, state, server):
        if self._bad(server, "plan"):
            raise RuntimeError("the plan went wrong")
        if self._bad(server, "cohort"):
            return Plan("train", [0, 0], state)
        if self._bad(server, "cohort outside"):
            return Plan("train", [0, server.clients], state)
        if self._bad(server, "strange cohort"):
            return Plan("train", ["somebody"], state)
        if self._bad(server, "private for no client"):
            return Plan("train", server.cohort(), state, private=[0])
        if self._bad(server, "strange private"):
            return Plan("train", server.cohort(), state, private={1: torch.ones(2)})
        if self._bad(server, "private outside"):
            return Plan("train", [0, 2], state, private={1: {"more": 1}})
        if self._bad(server, "private twice"):
            return Plan("train", server.cohort(), state, private={1: dict(state)})
        if self._bad(server, "no plan"):
            return "train"
        if self._bad(server, "never closed"):
            return Plan("train", [0], state, closes_round=False)
        if self._bad(server, "ended within"):
            return None if server.exchange else Plan("train", [0], state, closes_round=False)
        if self._bad(server, "state written"):
            next(iter(state.values())).add_(1)
        return super().plan(state, server)

    def client(self, task, message, client):
        if client.id != 1:
            return super().client(task, message, client)
        if self._bad(client, "exception"):
            raise KeyError("no such thing")
        if self._bad(client, "message written"):
            next(iter(message.values())).add_(1)
        network = client.model(message)
        bad_loss = self._bad(client, "nan loss")
        fit = client.fit(network, nan_loss if bad_loss else cross_entropy)
        upload = weights(network)
        if self._bad(client, "aliased upload"):
            upload = network.state_dict()
        if self._bad(client, "aliased state"):
            return Reply(upload, {"mine": network[1].weight.detach()})
        if self._bad(client, "nan upload"):
            upload["0.body.1.bias"][3] = float("nan")
        if self._bad(client, "inf upload"):
            upload["0.body.1.bias"][3] = float("inf")
        if self._bad(client, "no tree"):
            upload = {"set": {1, 2}}
        if self._bad(client, "gradient"):
            upload = dict(network.named_parameters())
        if self._bad(client, "no reply"):
            return upload
        claims = Claims()
        if self._bad(client, "nan claim"):
            claims = Claims(clean=torch.full((client.size,), float("nan")))
        if self._bad(client, "large claim"):
            claims = Claims(clean=torch.full((client.size,), 1.5))
        if self._bad(client, "negative claim"):
            claims = Claims(clean=torch.full((client.size,), -0.5))
        if self._bad(client, "gradient claim"):
            claims = Claims(clean=torch.ones(client.size, requires_grad=True))
        if self._bad(client, "bool claim"):
            claims = Claims(clean=torch.ones(client.size, dtype=torch.bool))
        if self._bad(client, "short claim"):
            claims = Claims(labels=client.labels[:-1])
        if self._bad(client, "noisy claim"):
            claims = Claims(noisy=torch.tensor(True))
        metrics = {"loss": fit.loss}
        if self._bad(client, "no metric"):
            metrics["share"] = None
        if self._bad(client, "many metrics"):
            metrics["share"] = torch.ones(3)
        if self._bad(client, "network metric"):
            metrics["share"] = network
        return Reply(upload, metrics=metrics, claims=claims)

    def aggregate(self, state, uploads, server):
        if self._bad(server, "aliased sum"):
            return server.model(state).state_dict()
        if self._bad(server, "aggregate"):
            raise RuntimeError("the sum went wrong")
        if self._bad(server, "upload written"):
            next(iter(uploads[0].content.values())).add_(1)
        if self._bad(server, "nan state"):
            return map_tensors(lambda value: value * float("nan"), state)
        if self._bad(server, "no state"):
            return None
        if self._bad(server, "note"):
            server.note(tensor=torch.ones(2))
        return super().aggregate(state, uploads, server)

    def predictors(self, state, server):
        if self._bad(server, "state written late"):
            next(iter(state.values())).add_(1)
        if self._bad(server, "nan scores"):
            return {"main": lambda images: torch.full((len(images), server.classes), float("nan"))}
        if self._bad(server, "trains"):
            return {"main": server.model(state)}
        if self._bad(server, "no main"):
            return {"global": super().predictors(state, server)["main"]}
        return super().predictors(state, server)


def nan_loss(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * float("nan")


class Undefined(Averaging):
    """Numbers that have no value: 0 of 0."""

    card = card("undefined")

    def client(self, task, message, client):
        reply = super().client(task, message, client)
        return Reply(reply.upload, metrics={"id": client.id or float("nan"), "ratio": float("inf")})

    def diagnostics(self, state):
        return {"one": 1.0, "ratio": float("nan")}
