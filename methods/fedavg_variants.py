"""FedAvg with one known remedy each: reference rows that give the scale to methods made for noisy labels.

A network that is trained on wrong labels learns them late, so whatever keeps it from learning everything helps a little
without knowing anything of noise.  A method for noisy labels should beat these rows, which cost nothing:

    fedavg-decay   the learning rate falls over the rounds
    fedavg-ema     the server also averages the global weights over the rounds, and that average is evaluated
    fedavg-gce     the generalised cross-entropy (Zhang & Sabuncu, «Generalized Cross Entropy Loss for Training Deep
                   Neural Networks with Noisy Labels», NeurIPS 2018) in place of the cross-entropy
    fedavg-mixup   mixed images and labels (Zhang et al., «mixup: Beyond Empirical Risk Minimization», ICLR 2018)

All else is FedAvg's: the server sends w, client m trains it on its n_m samples and sends w_m, and the next w is
sum_m n_m w_m / sum_m n_m.  With T rounds, t from 0, C classes, p [C] = softmax(f(x)) and p_y its share of the given
label:

    decay   lr_t = lr factor(t);  cosine: factor = f + (1 - f) (1 + cos(pi t / T)) / 2;  step: g^(milestones up to t)
    ema     a_1 = w_1;  a_k = a_{k-1} + max(1 - d, 1/k) (w_k - a_{k-1})
    gce     L_q = (1 - p_y^q) / q: the cross-entropy as q -> 0, the mean absolute error (halved) at q = 1
    mixup   x' = u x_i + (1 - u) x_j,  L = u CE(x', y_i) + (1 - u) CE(x', y_j),  u ~ Beta(alpha, alpha) a batch

Departures, and why:

* The decay belongs to the method here and lies on top of the protocol's rate.  So it can stand in the track ``common``,
  whose rate is constant, as a labelled row.
* The average's first rounds weigh the same (1/k), so that neither the random first weights nor a slow start stay in it:
  with d = .9 and ten rounds it is their plain mean.
* Truncated GCE (off by default) prunes in every turn, by the network that arrived, where the paper fixes the pruned set
  for ten epochs: clients keep no flags that way.
"""

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)

from flnoisebench.api import Card, Config, Field, Method, Plan, Reply, Rounds, average, cross_entropy, weights


class Variant(Method):
    """FedAvg with the client's training left open; no method by itself."""

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        network = client.model(message)
        fit, metrics = self.train(network, message, client)
        return Reply(weights(network), metrics={"loss": fit.loss, **metrics})

    def train(self, network, message, client):
        """(what ``fit`` returned, metrics besides the loss)."""
        return client.fit(network, cross_entropy), {}

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}


# --------------------------------------------------------------------------------------------------- decay


class DecaySettings(Config):
    schedule: Literal["cosine", "step"] = Field("cosine", why="no milestones to choose; step is ResNet's and GCE's")
    final: float = Field(0.0, ge=0, le=1, unit="share of the rate", why="where the cosine would end, at round T")
    milestones: tuple[Rounds, ...] = Field(
        (Rounds(0.5), Rounds(0.75)), min_length=1, unit="rounds", why="of step; 32k and 48k of ResNet's 64k steps"
    )
    gamma: float = Field(0.1, gt=0, le=1, why="of step: the rate's factor at each milestone; ResNet's")


def decay(settings, round, rounds):
    """The rate's factor in round ``round`` (from 0) of ``rounds``."""
    if settings.schedule == "cosine":
        return settings.final + (1 - settings.final) * (1 + math.cos(math.pi * round / rounds)) / 2
    return settings.gamma ** sum(milestone.of(rounds) <= round for milestone in settings.milestones)


class FedAvgDecay(Variant):
    card = Card(
        title="FedAvg + learning-rate decay",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with a cosine (Loshchilov & Hutter, ICLR 2017)",
        year=2017,
        departures=("the decay is the method's, on top of the protocol's rate, in the track common too",),
    )
    Config = DecaySettings

    def train(self, network, message, client):
        budget = client.protocol.optimiser_at(client.round)
        rate = budget.lr * decay(self.config, client.round, client.protocol.rounds)
        fit = client.fit(network, cross_entropy, optimiser=budget.model_copy(update={"lr": rate}))
        return fit, {"lr": rate}


# ----------------------------------------------------------------------------------------------------- ema


class EmaSettings(Config):
    decay: float = Field(0.9, ge=0, lt=1, why="d, a round: the average looks back some 1 / (1 - d) = 10 rounds")


class FedAvgEma(Variant):
    card = Card(
        title="FedAvg + weight averaging (EMA)",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with Polyak & Juditsky's averaging (1992)",
        year=2017,
        departures=("the first rounds weigh the same, so the random first weights are not in the average",),
    )
    Config = EmaSettings

    def init(self, server):
        """weights: w, what is sent.  average: a.  count: k, the networks in it."""
        first = weights(server.model())
        return {"weights": first, "average": first, "count": 0}

    def plan(self, state, server):
        return Plan("train", server.cohort(), state["weights"])

    def aggregate(self, state, uploads, server):
        new = super().aggregate(state, uploads, server)
        count = state["count"] + 1
        share = max(1 - self.config.decay, 1 / count)
        # BatchNorm's running statistics are averaged like the weights that made them; its step counters, being
        # integers, stay the newest (``average`` takes the larger)
        mean = new if share == 1 else average([state["average"], new], [1 - share, share])
        return {"weights": new, "average": mean, "count": count}

    def predictors(self, state, server):
        return {
            "main": server.model(state["average"], frozen=True),
            "raw": server.model(state["weights"], "raw", frozen=True),
        }


# ----------------------------------------------------------------------------------------------------- gce


class GceSettings(Config):
    q: float = Field(0.7, gt=0, le=1, why="the paper's in all its experiments; 1 is the mean absolute error")
    truncation: float | None = Field(
        None, gt=0, lt=1, why="k: samples with p_y <= k are not learned; None: off, the paper's plain L_q. Its k is .5"
    )
    truncation_start: Rounds = Field(
        Rounds(0.33),
        unit="rounds",
        why="the paper's 40 of 120 epochs. Classes that are not learned by then are lost: on digits too soon (51 %)",
    )


def log_share(network, batch):
    """log p_y, float32 [B]."""
    return network(batch.x).float().log_softmax(1).gather(1, batch.y.unsqueeze(1)).squeeze(1)


def l_q(log_p, q):
    """L_q at p = exp(log_p).  As -expm1(q log p): p^q has no finite gradient where p underflows, and for small q its
    difference to 1 loses its digits."""
    return -torch.expm1(q * log_p) / q


def generalised_cross_entropy(network, batch):
    return l_q(log_share(network, batch), batch.given["q"]).mean()


def truncated_cross_entropy(network, batch):
    """The constant L_q(k) for samples that are not kept."""
    loss, q, k = l_q(log_share(network, batch), batch.given["q"]), batch.given["q"], batch.given["k"]
    return torch.where(batch.sample["keep"], loss, l_q(k.log(), q).to(loss.dtype)).mean()


def received_log_share(batch):
    return log_share(batch.frozen["received"], batch)


class FedAvgGce(Variant):
    card = Card(
        title="FedAvg + generalised cross-entropy",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with the loss of Zhang & Sabuncu, NeurIPS 2018",
        year=2018,
        departures=("truncation, off by default, prunes anew in every turn instead of every ten epochs",),
    )
    Config = GceSettings

    def train(self, network, message, client):
        q, k = self.config.q, self.config.truncation
        if k is None or client.round < self.config.truncation_start.of(client.protocol.rounds):
            return client.fit(network, generalised_cross_entropy, given={"q": q}), {}
        received = client.model(message, "received", frozen=True)
        keep = client.apply(received_log_share, frozen={"received": received}).exp() > k
        fit = client.fit(network, truncated_cross_entropy, sample={"keep": keep}, given={"q": q, "k": k})
        return fit, {"kept": keep.double().mean().item()}


# --------------------------------------------------------------------------------------------------- mixup


class MixupSettings(Config):
    alpha: float = Field(1.0, gt=0, why="of Beta(alpha, alpha), here uniform: the paper's on CIFAR-10; .2 on ImageNet")


def mixing(sizes, alpha, seed):
    """{share: float32 [steps], partner: int64 [steps, the widest batch]}: u and a permutation for batches of ``sizes``.

    A row's entries past its own batch are never read.
    """
    rng = np.random.default_rng(seed)
    partner = np.zeros((len(sizes), max(sizes, default=1)), dtype=np.int64)
    for step, size in enumerate(sizes):
        partner[step, :size] = rng.permutation(size)
    share = rng.beta(alpha, alpha, len(sizes)).astype(np.float32)
    return {"share": torch.from_numpy(share), "partner": torch.from_numpy(partner)}


def mixed_cross_entropy(network, batch):
    share, partner = batch.draw["share"], batch.draw["partner"][: len(batch.y)]
    scores = network(share * batch.x + (1 - share) * batch.x.index_select(0, partner)).float()
    own, other = F.cross_entropy(scores, batch.y), F.cross_entropy(scores, batch.y.index_select(0, partner))
    return share * own + (1 - share) * other


class FedAvgMixup(Variant):
    card = Card(
        title="FedAvg + mixup",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with mixup (Zhang et al., ICLR 2018)",
        year=2018,
    )
    Config = MixupSettings

    def train(self, network, message, client):
        sizes = client.batch_sizes() * client.protocol.local_epochs
        draw = mixing(sizes, self.config.alpha, client.seed("mixup"))
        return client.fit(network, mixed_cross_entropy, draw=draw), {}
