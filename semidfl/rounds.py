"""Algorithm 1 of the paper: one round of the clients of a cohort."""

from torch import Tensor

from semidfl.cohort import Cohort
from semidfl.exchange.base import Exchange, Neighbourhood, mixings
from semidfl.learn.aggregate import say
from semidfl.learn.robust import combiner
from semidfl.methods.base import Method
from semidfl.record.log import RoundLog

__all__ = ["one_round"]


def one_round(t: int, cohort: Cohort, method: Method, exchange: Exchange, log: RoundLog) -> None:
    """Clients learn by themselves (first loop), then agree with their neighbours (second loop)."""
    with cohort.looking_at(t, method.setup.config.pseudo.pool):
        claims = learn(t, cohort, method, exchange, log)
    with log.phase("mix"):
        agree(t, cohort, method, exchange, claims, log)  # phi_i^{t+1}, psi_i^{t+1}, Eq. 12 and 3


def learn(t: int, cohort: Cohort, method: Method, exchange: Exchange, log: RoundLog) -> dict[str, Tensor]:
    """Local training; returns what each client says of its classifier, as its accuracy on generated data."""
    with log.phase("pseudo-label"):
        pseudo = method.pseudo_label(t, cohort, exchange, log)  # P_i^t <- NPL(Z_i), Eq. 5-9
    with log.phase("generator"):
        method.train_generator(t, cohort, pseudo, log)  # psi_i^{t+1/2} on Y_i and P_i^t, Eq. 11
    with log.phase("generate"):
        method.generate(t, cohort, log)  # D_i^t from psi_i^{t+1/2}, from round R on
    with log.phase("classifier"):
        method.train_classifier(t, cohort, pseudo, log)  # phi_i^{t+1/2} on C-MixUp, Eq. 10
        return method.claims(cohort, pseudo)  # a_i on generated data


def agree(t: int, cohort: Cohort, method: Method, exchange: Exchange, claims: dict[str, Tensor], log: RoundLog) -> None:
    """Global consensus: weights by accuracy on generated data (Eq. 12), then the weighted mean (Eq. 3)."""
    config, learners = method.setup.config, {"classifier": cohort.classifier}
    if cohort.generator is not None and t % config.exchange.generator_every == 0:
        learners["generator"] = cohort.generator
    ordered = config.compute.deterministic or method.setup.together
    mix = combiner(config.aggregation, ordered)  # Eq. 3, or a rule that withstands liars
    # Local momentum keeps pulling a client towards its own classes; the neighbourhood's does so less.
    momentum = {"velocity"} & cohort.classifier.optimiser.keys() if config.aggregation.momentum else ()
    for topic in mixings(config.aggregation.gossip):
        models = {name: learner.params for name, learner in learners.items()}
        models |= {name: cohort.classifier.optimiser[name] for name in momentum}
        shared = exchange.share(t, topic, models | claims)
        near = Neighbourhood.of(method.setup.graph, cohort.ids, shared.ids, method.setup.device)
        weights = near.trusted(method.weights(near, shared.tensors.get("accuracy")), shared.trust)
        weights = near.trusted(weights, say(shared.tensors.get("taught"), config.aggregation.idle))
        for name, learner in learners.items():
            learner.params = mix(weights, near, learner.params, shared.tensors[name])
        for name in momentum:
            cohort.classifier.optimiser[name] = mix(weights, near, models[name], shared.tensors[name])
    method.after_mixing(t, cohort)
    cohort.classifier.follow(config.classifier.ema)
    if cohort.generator is not None:
        cohort.generator.follow(config.generator.ema)
    log["weights"] = weights.float()  # of the last mixing, if there were several
    if "accuracy" in claims:
        log["generated_accuracy"] = claims["accuracy"]
