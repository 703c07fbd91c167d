"""FedNed: extremely noisy clients as teachers of what not to predict.

Paper: "Federated Learning with Extremely Noisy Clients via Negative Distillation", AAAI 2024.  Code: linChen99/FedNed,
commit ca8a2cc.  The paper's abstract and the code were read, its body was not: where they differ the abstract is
followed (``mode=intended``), and ``code_literal`` is what the published code computes.

The server owns unlabelled images.  A model trained on mostly wrong labels is unsure of them, so the server flags a
client whose model is more uncertain than the cohort's mean by a factor.  Flagged clients are not thrown away: the
model of their given labels becomes a bad teacher, from whose predictions the averaged model is pushed away, and a
second model, of the global model's confident pseudo-labels, may still join the average.

Symbols:

    M, J, S        clients, classes, the cohort of a round
    w, w_m, D_m    the global model, client m's, its samples; P the server's public images
    pbar_m(x)      [J], the mean softmax of w_m at x over K passes, dropout on the features before the classifier
    u_m, v_m       sum_x H(pbar_m(x)) over one batch of P, in nats; its share u_m / sum_{k in S} u_k
    T              the temperature of distillation and pseudo-labels
    a_b(x)         [J], the bad target: softmax(1/z), elementwise, of bad teacher b's scores z

One round: the cohort gets w and one bit each, flagged or not.  Everybody trains on its given labels; a flagged
client trains a second model from w on  kept_i CE(f(x_i), argmax f_w(x_i)),  kept_i: max softmax(f_w(x_i)/T) >= .95.
During warm-up that is FedAvg.  Then the server scores S (a flagged client by its second model), flags v_m > 1.2/|S|,
for good, averages the models that passed with weights D_m, and takes 100 Adam steps on

    mean_b KL(a_b || softmax(g(x)/T)),    b: the given-label models of all flagged clients of S.

The gradient of that mean is the gradient of KL(abar || .), abar the mean target, so abar is computed once for the
images of the 100 batches, and the number of teachers does not change a step.

Departures, and why:

* Published, the distillation moves nothing: its optimiser holds one model's parameters and its loss goes through
  another.  Here it moves the averaged model.  Adam at the code's .01 to .05 would wreck a ResNet, so it is 1e-4.
* Adam begins anew in every round; in the code one Adam, which moves nothing, lives as long as the run.
* Published, a flagged client is one model in both roles, trained on pseudo-labels and then on the given ones.
* Published, the mask multiplies the batch's mean loss, which trains on the unconfident samples too.
* Published, pseudo-labels come from the model in training (``labeller=own``); the abstract says the global model.
* Reciprocal scores do not invert an order, and a score near 0 outweighs all others: |z| is held at .1 or more, and
  softmax(-z/T) is a switch.  Published, a_b is also divided by T, which leaves no distribution (``neg_target``).
* Published, the threshold is .12, which at 20 participants is 2.4 times the mean and flags nobody.  Here it is a
  multiple of the mean share, the same at 10.  Half of the clients a round, as published, is a matter of the budget:
  the track own has it, the track common asks as many as of every method.
* Published, models are scored with batch statistics.  Here BatchNorm has its running ones, in scoring and in
  distillation: public images are another domain, and must not leave their statistics in the averaged model.
* Teacher and student see the same, unaugmented image (``public_view``).  The code augments public images; there, too,
  both see the same, but a target computed in advance knows no later augmentation.
* Nothing holds the averaged model while it is pushed.  If it then agrees with itself before on less than 90 % of the
  distilled images, the push is dropped.
* All models of a round are scored under the same dropout masks, so that masks do not tell clients apart.
* With no good client the global model stays; with uncertainties of 0 or no number nobody is flagged.  Notes say so.
* Warm-up is 10 rounds as published, but at most a fifth of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)

from flnoisebench.api import (
    Batch,
    Card,
    Client,
    Config,
    Field,
    Method,
    Optimiser,
    Plan,
    Preset,
    Reply,
    Rounds,
    Server,
    Tree,
    Upload,
    average,
    cross_entropy,
    to,
    weights,
)

NegTarget = Literal["reciprocal", "reciprocal_over_t", "negated"]


class Settings(Config):
    mode: Literal["intended", "code_literal"] = Field(
        "intended",
        why="code_literal: no distillation, one model in both of a flagged client's roles, the mask on the mean loss",
    )
    warm: Rounds = Field(Rounds(10), unit="rounds", why="the code's; FedAvg until then")
    warm_most: Rounds = Field(Rounds(0.2), unit="rounds", why="the most that warm-up takes, for runs under 50 rounds")

    # scoring
    threshold: float = Field(1.2, gt=0, unit="times 1/|S|", why="the code's .12 at its 10 participants")
    dropout: float = Field(0.3, ge=0, lt=1, unit="share of features", why="the code's")
    passes: int = Field(10, ge=1, why="K, the code's")
    score_images: int = Field(128, ge=1, unit="images", why="the code's: one batch, the same for all clients")

    # a flagged client's second model
    labeller: Literal["received", "own"] = Field(
        "received", why="the abstract's global model gives pseudo-labels; own: the model in training, as in the code"
    )
    temperature: float = Field(2.0, gt=0, why="T, the code's, of pseudo-labels and of distillation")
    confidence: float = Field(0.95, ge=0, le=1, why="the code's least confidence of a pseudo-label, at temperature T")

    # negative distillation
    neg_target: NegTarget = Field(
        "reciprocal",
        why="the code's softmax(1/z); _over_t: divided by T as there; negated: softmax(-z/T), an inversion",
    )
    clamp: float = Field(
        0.1, gt=0, unit="score", why="the least |z| of 1/z, or one score near 0 takes the whole target"
    )
    distill_steps: int = Field(100, ge=0, unit="steps", why="the code's; 0: no distillation")
    distill_batch: int = Field(128, ge=1, unit="images", why="the code's")
    distill_lr: float = Field(1e-4, gt=0, unit="Adam step", why="the code's .01 to .05, if live, would wreck a ResNet")
    distill_weight_decay: float = Field(0.0, ge=0, why="the code's .002 would pull a trained model to zero")
    agreement: float = Field(
        0.9, ge=0, le=1, why="the least agreement with the model before, or distillation is dropped; 0: never dropped"
    )
    public_view: Literal["plain", "train"] = Field(
        "plain", why="of public images in distillation; train: teacher and student augment independently"
    )


def _own(rounds: int) -> dict[str, Any]:
    """The code's budget; 10 epochs on half of the clients are 5 rounds' images."""
    optimiser = {"name": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}
    return {"rounds": rounds, "local_epochs": 10, "batch": 32, "participation": 0.5, "optimiser": optimiser}


def _preset(about: str, **settings: Any) -> Preset:
    """``settings`` on every data set; what differs is the length of the track ``own``."""
    rounds = {"cifar10": 100, "cifar100": 100, "clothing1m": 10, "fashion-mnist": 10, "folder": 20, "digits": 20}
    return Preset(
        about=about,
        settings=settings,
        protocol=_own(100),
        datasets={
            name: Preset(
                about="a fifth of the standard rounds, each of 10 local epochs on half of the clients",
                protocol=_own(count),
            )
            for name, count in rounds.items()
        },
    )


# ------------------------------------------------------------------------------------------------ uncertainty


def entropy(p: torch.Tensor) -> torch.Tensor:
    """H of distributions [..., J], in nats."""
    return torch.special.entr(p).sum(-1)


def uncertainty(batch: Batch) -> torch.Tensor:
    """H(pbar(x)) [B].  given: masks [K, k, width], of the k images at the ascending positions [k]."""
    encoder, head = batch.frozen["network"].children()
    features = encoder(batch.x)
    row = torch.searchsorted(batch.given["positions"], batch.index)
    masks = batch.given["masks"].index_select(1, row)
    with torch.autocast(device_type=features.device.type, enabled=False):
        return entropy(head(features.float() * masks).softmax(-1).mean(0))


def dropout_masks(shape: tuple[int, int, int], p: float, rng: torch.Generator) -> torch.Tensor:
    """Inverted dropout's factors: 0 with probability p, else 1/(1 - p)."""
    return (torch.rand(shape, generator=rng) >= p).float() / (1 - p)


def shares(u: Sequence[float]) -> list[float] | None:
    """v_m; None where the uncertainties say nothing: all 0, or one is no number."""
    total = math.fsum(u)
    return [value / total for value in u] if 0 < total < math.inf else None


# ----------------------------------------------------------------------------------- a flagged client's second model


def pseudo(network: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Tree]:
    """Cross-entropy with confident pseudo-labels.  given: temperature; confidence; masked, false for the mask on the
    batch's mean.  frozen: labeller, where it is not the network itself.  carry: kept and seen, counts of samples."""
    scores = network(batch.x).float()
    guide = batch.frozen["labeller"](batch.x).float() if "labeller" in batch.frozen else scores.detach()
    certain, label = (guide / batch.given["temperature"]).softmax(1).max(1)
    kept = (certain >= batch.given["confidence"]).float()
    each = F.cross_entropy(scores, label, reduction="none")
    each = torch.where(batch.given["masked"], each, each.mean())
    carry = {"kept": batch.carry["kept"] + kept.sum(), "seen": batch.carry["seen"] + torch.ones_like(kept).sum()}
    return (each * kept).mean(), carry


# ------------------------------------------------------------------------------------------- negative distillation


def scores(batch: Batch) -> torch.Tensor:
    return batch.frozen["network"](batch.x).float()


def bad_target(z: torch.Tensor, kind: NegTarget, temperature: float, clamp: float) -> torch.Tensor:
    """What a bad teacher with scores z [n, J] makes the student want."""
    if kind == "negated":
        return (-z / temperature).softmax(-1)
    held = torch.where(z < 0, -1.0, 1.0) * z.abs().clamp_min(clamp)
    target = (1 / held).softmax(-1)
    return target / temperature if kind == "reciprocal_over_t" else target


def divergence(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """KL(y || softmax(g(x)/T)), the batch's mean; y [B, J].  given: temperature."""
    network.eval()  # BatchNorm keeps the average's statistics: public images are another domain
    log_p = (network(batch.x).float() / batch.given["temperature"]).log_softmax(1)
    return F.kl_div(log_p, batch.y, reduction="batchmean")


class FedNed(Method):
    card = Card(
        title="FedNed",
        paper="Lin et al., AAAI 2024",
        year=2024,
        conditions=(
            "public images",
            "extremely noisy clients",
            "warm-up (10 rounds)",
        ),
        departures=(
            "the distillation is live: the published code's moves nothing (preset code-literal: none)",
            "a flagged client trains two models from the global one, where the code trains one in both roles",
            "unconfident pseudo-labels are masked one by one, where the code scales the batch's mean",
            "pseudo-labels come from the received global model, as the abstract says, not from the model in training",
            "Adam's step is 1e-4 and its decay 0: the code's .01 to .05 were never applied to a model",
            "Adam's moments begin anew in every round, where the code's last as long as the run",
            "|score| is at least .1 in a reciprocal target, which is not divided by T",
            "the threshold is 1.2 times the mean share, the code's .12 at its 10 participants",
            "BatchNorm has its running statistics in scoring and distillation",
            "public images are not augmented, and their mean bad target is computed in advance",
            "distillation that changes over 10 % of its own predictions is dropped",
            "warm-up takes at most a fifth of the run",
        ),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "intended": _preset("the method as its abstract describes it; the default"),
        "code-literal": _preset(
            "what the published code computes: FedAvg over clients with low entropy",
            mode="code_literal",
            labeller="own",
        ),
    }

    # -- server

    def init(self, server: Server) -> Tree:
        """weights: w.  flagged: client ids in the order of flagging, which only grow."""
        rounds = server.protocol.rounds
        if self._warm(rounds) >= rounds:
            raise ValueError(
                f"FedNed's warm-up of {self._warm(rounds)} rounds fills the run of {rounds}: nobody would ever be "
                "scored. Set warm or warm_most lower, or run fedavg"
            )
        if server.public is None:
            raise ValueError("FedNed scores and distils on public images, and this data set brings none")
        return {"weights": weights(server.model()), "flagged": []}

    def plan(self, state: Tree, server: Server) -> Plan:
        cohort = server.cohort()
        bit = {m: {"flagged": m in state["flagged"]} for m in cohort}
        return Plan("train", cohort, {"weights": state["weights"]}, bit)

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        if server.round < self._warm(server.protocol.rounds):
            new = average([upload.content["weights"] for upload in uploads], [upload.size for upload in uploads])
            return {**state, "weights": new}
        # one network for all uploads in turn: one recording, and memory that does not grow with the cohort
        reader = server.model(state["weights"], "reader", frozen=True)
        v = shares(self._uncertainties(uploads, reader, server))
        if v is None:
            server.note(undecided="the uncertainties are all 0, or one is no number")
            v = [0.0] * len(uploads)
        limit = self.config.threshold / len(uploads)
        good = [upload for upload, share in zip(uploads, v, strict=True) if share <= limit]
        new = {upload.client for upload, share in zip(uploads, v, strict=True) if share > limit}
        flagged = state["flagged"] + sorted(new.difference(state["flagged"]))
        server.claim(flagged)
        server.note(shares=v, over=sorted(new), flagged=flagged)
        w = state["weights"]
        if good:
            w = average([upload.content["weights"] for upload in good], [upload.size for upload in good])
        else:
            server.note(no_good_client=True)
        if self.config.mode == "intended" and self.config.distill_steps:
            # a client flagged just now has trained one model, on its given labels
            bad = {u.client: u.content.get("noisy", u.content["weights"]) for u in uploads if u.client in flagged}
            w = self._pushed_away(w, bad, reader, server)
        return {"weights": w, "flagged": flagged}

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {"main": server.model(state["weights"], frozen=True)}

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        return {"flagged": len(state["flagged"])}

    def _uncertainties(self, uploads: Sequence[Upload], reader: torch.nn.Module, server: Server) -> list[float]:
        """u_m of each upload's model."""
        config, public = self.config, server.public
        assert public is not None
        order = torch.randperm(public.size, generator=server.rng("score images"))
        positions = order[: config.score_images].sort().values
        width: int = reader[0].width  # type: ignore[index]
        masks = dropout_masks((config.passes, len(positions), width), config.dropout, server.rng("dropout"))
        given = to({"positions": positions, "masks": masks}, next(reader.parameters()).device)
        found = []
        for upload in uploads:
            reader.load_state_dict(upload.content["weights"])
            h = server.apply(
                uncertainty, data=public, subset=positions, frozen={"network": reader}, given=given,
                stream=f"score {upload.client}",
            )  # fmt: skip
            found.append(h.double().sum())
        return torch.stack(found).tolist()

    def _pushed_away(self, w: Tree, teachers: Mapping[int, Tree], reader: torch.nn.Module, server: Server) -> Tree:
        """w after negative distillation; w itself with no teacher, or where it changed too much."""
        config, public = self.config, server.public
        server.note(teachers=list(teachers))
        if not teachers:
            return w
        assert public is not None
        # each image of the steps once, where there are enough
        order = torch.randperm(public.size, generator=server.rng("distillation images"))
        subset = order[: config.distill_steps * config.distill_batch]

        def read(model: Tree, stream: str, view: Literal["plain", "train"] = "plain") -> torch.Tensor:
            reader.load_state_dict(model)
            return server.apply(
                scores, data=public, subset=subset, view=view, frozen={"network": reader}, stream=stream
            )

        mean: Any = 0  # over teachers, one at a time in memory
        for m, teacher in teachers.items():
            z = read(teacher, f"teacher {m}", config.public_view)
            target = bad_target(z, config.neg_target, config.temperature, config.clamp)
            mean = mean + target.double() / len(teachers)
        labels = torch.zeros(public.size, server.classes, device=mean.device)
        labels[subset.to(mean.device)] = mean.float()
        student = server.model(w)
        fit = server.fit(
            student,
            divergence,
            data=public,
            labels=labels,
            subset=subset,
            views=1 if config.public_view == "train" else 0,
            batch=config.distill_batch,
            last_batch="drop",
            steps=config.distill_steps,
            given={"temperature": config.temperature},
            optimiser=Optimiser(
                name="adam", lr=config.distill_lr, momentum=0.9, weight_decay=config.distill_weight_decay
            ),
        )
        pushed = weights(student)
        agree = (read(w, "before").argmax(1) == read(pushed, "after").argmax(1)).double().mean().item()
        server.note(distillation_loss=fit.loss, agreement=agree, dropped=agree < config.agreement)
        return w if agree < config.agreement else pushed

    # -- client

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        network, metrics, upload = client.model(message["weights"]), {}, {}
        literal = self.config.mode == "code_literal"
        if message["flagged"]:
            second = network if literal else client.model(message["weights"], "pseudo")
            metrics = self._pseudo(second, message["weights"], client)
            if not literal:
                upload["weights"] = weights(second)
        fit = client.fit(network, cross_entropy, labels=client.labels)
        # an unflagged client's one model; a flagged one's bad teacher, unless it is both
        upload["noisy" if "weights" in upload else "weights"] = weights(network)
        return Reply(upload, metrics={"loss": fit.loss, **metrics})

    def _pseudo(self, network: torch.nn.Module, received: Tree, client: Client) -> dict[str, float]:
        """Train on pseudo-labels, in place; the metrics of it."""
        config = self.config
        frozen = {}
        if config.labeller == "received":
            frozen["labeller"] = client.model(received, "labeller", frozen=True)
        fit = client.fit(
            network,
            pseudo,
            given={
                "temperature": config.temperature,
                "confidence": config.confidence,
                "masked": config.mode == "intended",
            },
            frozen=frozen,
            carry={"kept": torch.zeros(()), "seen": torch.zeros(())},
            stream="pseudo",
        )
        kept, seen = torch.stack([fit.carry["kept"], fit.carry["seen"]]).tolist()
        return {"pseudo_loss": fit.loss, "pseudo_kept": kept / max(seen, 1)}

    # -- both

    def _warm(self, rounds: int) -> int:
        """The rounds of FedAvg at the beginning of a run of ``rounds``."""
        return min(self.config.warm.of(rounds), self.config.warm_most.of(rounds))
