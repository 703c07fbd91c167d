"""FedAvg (McMahan et al., «Communication-Efficient Learning of Deep Networks from Decentralized Data», AISTATS 2017).

The server sends w; client m trains it on its n_m samples and sends w_m; the next w is sum_m n_m w_m / sum_m n_m.
"""

from flnoisebench.api import Card, Method, Plan, Reply, average, cross_entropy, weights


class FedAvg(Method):
    card = Card(title="FedAvg", paper="McMahan et al., AISTATS 2017", year=2017)

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        network = client.model(message)
        fit = client.fit(network, cross_entropy, labels=client.labels)
        return Reply(weights(network), metrics={"loss": fit.loss})

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}
