"""FedAvg with gated relabelling: how much of FedCova's gain any classifier gets from correcting labels.

A reference row, not a paper's method.  FedCova corrects the labels of the clients that disagree most with the global
classifier; this does the same with FedAvg's softmax network in place of class covariances, so that the difference
between the two is what the covariances bring.

    f        the global network             p_i   softmax(f(x_i))           y_i   client m's current labels
    r_m      the share of client m's samples with argmax p_i != y_i (its disagreement)

In a correction round every client of the cohort uploads r_m; those with r_m >= gate are told so and take y_i <-
argmax p_i where max p_i >= eta, for good.  Then the round goes on as FedAvg's.  There is no leave-one-out: the share
of one client cannot be taken out of trained weights.
"""

import torch

from flnoisebench.api import Card, Claims, Config, Field, Method, Plan, Preset, Reply, Rounds, average, moments, weights
from flnoisebench.api import cross_entropy as loss


class Settings(Config):
    gate: float = Field(0.55, ge=0, le=1, why="the least r_m that lets a client be corrected; FedCova's best-found")
    eta: float = Field(0.5, ge=0, le=1, why="the least confidence of a new label; FedCova's")
    correct_start: Rounds = Field(Rounds(0.4), unit="rounds", why="FedCova's round 200 of 500")
    correct_period: Rounds = Field(Rounds(0.06), unit="rounds", why="FedCova's 30 of 500; at least 1")
    correct_stop: Rounds = Field(Rounds(1.0), unit="rounds", why="exclusive")


def scores(batch):
    return batch.frozen["network"](batch.x).softmax(1)


class FedAvgRelabel(Method):
    card = Card(
        title="FedAvg + relabelling",
        paper="reference row: FedAvg (McMahan et al., AISTATS 2017) with FedCova's gated correction",
        year=2026,
    )
    Config = Settings
    presets = {  # noqa: RUF012 (a class attribute of the contract)
        "default": Preset(
            about="FedCova's gate and schedule",
            datasets={
                "digits": Preset(
                    about="FedCova's gate and schedule on digits: all of a gated client's samples, at rounds 30 and 60",
                    settings={
                        "gate": 0.3, "eta": 0.0, "correct_start": Rounds(0.3), "correct_period": Rounds(0.3),
                        "correct_stop": Rounds(0.9),
                    },
                )
            },
        )
    }  # fmt: skip

    def init(self, server):
        """weights: f.  corrected: (cohort, those to correct) between a correction round's exchanges, else None."""
        return {"weights": weights(server.model()), "corrected": None}

    def join(self, client):
        return {"labels": client.labels, "proposed": None}

    def plan(self, state, server):
        message = {"weights": state["weights"]}
        if state["corrected"] is not None:
            cohort, chosen = state["corrected"]
            return Plan("train", cohort, message, {m: {"correct_me": m in chosen} for m in cohort})
        if self.corrects(server.round, server.protocol.rounds):
            return Plan("score", server.cohort(), message, closes_round=False)
        return Plan("train", server.cohort(), message)

    def corrects(self, round, rounds):
        config = self.config
        return round in moments(rounds, config.correct_start, config.correct_period, config.correct_stop)

    def client(self, task, message, client):
        labels = client.state["labels"]
        if task == "score":
            network = client.model(message["weights"], frozen=True)
            confidence, best = client.apply(scores, frozen={"network": network}).max(1)
            disagreement = (best != labels).double().mean().item()
            proposed = torch.where(confidence >= self.config.eta, best, labels)
            return Reply({"disagreement": disagreement}, {"labels": labels, "proposed": proposed})
        chosen = message.get("correct_me")
        if chosen:
            labels = client.state["proposed"]
        network = client.model(message["weights"])
        fit = client.fit(network, loss, labels=labels)
        return Reply(
            weights(network), {"labels": labels, "proposed": None}, {"loss": fit.loss}, Claims(labels, noisy=chosen)
        )

    def aggregate(self, state, uploads, server):
        if state["corrected"] is None and self.corrects(server.round, server.protocol.rounds):
            chosen = [u.client for u in uploads if u.content["disagreement"] >= self.config.gate]
            server.claim(chosen)
            server.note(disagreement=[u.content["disagreement"] for u in uploads], corrected=chosen)
            return {**state, "corrected": [[u.client for u in uploads], chosen]}
        new = average([u.content for u in uploads], [u.size for u in uploads])
        return {"weights": new, "corrected": None}

    def predictors(self, state, server):
        return {"main": server.model(state["weights"], frozen=True)}
