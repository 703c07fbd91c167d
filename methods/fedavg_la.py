"""FedAvg with logit adjustment: how much of a method's gain is a remedy for unequal classes, not for noise.

A reference row, not a paper's method.  Loss: Menon et al., «Long-tail learning via logit adjustment», ICLR 2021, with
each client's own class shares as the prior, as FedNoRo (IJCAI 2023) trains its clients.

    z = f(x)   the network's logits     c_mk   client m's number of samples with the given label k     n_m = sum_k c_mk

    L = CE(z + a ln(c_m / n_m), y)        a: the adjustment, 1: softmax(z) then estimates what equal classes would give

A client that holds few classes is so not rewarded for predicting them everywhere.  Nothing here knows of noise, and a
method for noisy labels that has such a loss should beat this row.  All else is FedAvg's: the server sends w, client m
trains it and sends w_m, the next w is sum_m n_m w_m / sum_m n_m, and predictions are of z as it is.

Departure, and why:

* The counts are of the labels as given, wrong ones among them, since a client knows no others.
"""

import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)

from flnoisebench.api import Card, Config, Field, Method, Plan, Preset, Reply, average, weights


class Settings(Config):
    adjustment: float = Field(1.0, gt=0, why="a, the paper's tau; 1 is what the balanced error asks for, and FedNoRo's")


def log_prior(labels, classes, adjustment):
    """a ln(c / n), float32 [C] of int64 [n]: -inf for a class that the client does not hold."""
    counts = F.one_hot(labels, classes).sum(0).double()
    return (adjustment * (counts / counts.sum()).log()).float()


def adjusted_cross_entropy(network, batch):
    """In float32, also under autocast, whose half precision is too coarse for a shift by -inf or by several units."""
    return F.cross_entropy(network(batch.x).float() + batch.given["log_prior"], batch.y)


class FedAvgLA(Method):
    card = Card(
        title="FedAvg + logit adjustment",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with the loss of Menon et al., ICLR 2021",
        year=2021,
        departures=("the prior is each client's own, of its labels as given",),
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": Preset(
            about="the paper's adjustment, as FedNoRo's",
            datasets={"digits": Preset(about="half of it, as FedNoRo's on digits", settings={"adjustment": 0.5})},
        )
    }

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        network = client.model(message)
        prior = log_prior(client.labels, client.classes, self.config.adjustment)
        fit = client.fit(network, adjusted_cross_entropy, given={"log_prior": prior})
        return Reply(weights(network), metrics={"loss": fit.loss})

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}
