"""Algorithm 1 of the paper: one round of the clients of a cohort."""

from torch import Tensor

from semidfl.cohort import Cohort
from semidfl.exchange.base import Exchange, Neighbourhood
from semidfl.learn.aggregate import mix
from semidfl.methods.base import Method
from semidfl.record.log import RoundLog

__all__ = ["one_round"]


def one_round(t: int, cohort: Cohort, method: Method, exchange: Exchange, log: RoundLog) -> None:
    """Clients learn by themselves (first loop), then agree with their neighbours (second loop)."""
    with log.phase("pseudo-label"):
        pseudo = method.pseudo_label(t, cohort, exchange, log)  # P_i^t <- NPL(Z_i), Eq. 5-9
    with log.phase("generator"):
        method.train_generator(t, cohort, pseudo, log)  # psi_i^{t+1/2} on Y_i and P_i^t, Eq. 11
    with log.phase("generate"):
        method.generate(t, cohort, log)  # D_i^t from psi_i^{t+1/2}, from round R on
    with log.phase("classifier"):
        method.train_classifier(t, cohort, pseudo, log)  # phi_i^{t+1/2} on C-MixUp, Eq. 10
        accuracy = method.judge(cohort)  # a_i on generated data
    with log.phase("mix"):
        agree(t, cohort, method, exchange, accuracy, log)  # phi_i^{t+1}, psi_i^{t+1}, Eq. 12 and 3


def agree(t: int, cohort: Cohort, method: Method, exchange: Exchange, accuracy: Tensor | None, log: RoundLog) -> None:
    """Global consensus: weights by accuracy on generated data (Eq. 12), then the weighted mean (Eq. 3)."""
    models = {"classifier": cohort.classifier.params}
    if cohort.generator is not None:
        models["generator"] = cohort.generator.params
    if accuracy is not None:
        models["accuracy"] = accuracy
    # Local momentum keeps pulling a client towards its own classes; the neighbourhood's does so less.
    momentum = {"velocity"} & cohort.classifier.optimiser.keys() if method.setup.config.aggregation.momentum else ()
    models |= {name: cohort.classifier.optimiser[name] for name in momentum}
    shared = exchange.share(t, "models", models)
    near = Neighbourhood.of(method.setup.graph, cohort.ids, shared.ids, method.setup.device)
    weights = near.trusted(method.weights(near, shared.tensors.get("accuracy")), shared.trust)
    ordered = method.setup.config.compute.deterministic
    cohort.classifier.params = mix(weights, near, shared.tensors["classifier"], ordered)
    if cohort.generator is not None:
        cohort.generator.params = mix(weights, near, shared.tensors["generator"], ordered)
    for name in momentum:
        cohort.classifier.optimiser[name] = mix(weights, near, shared.tensors[name], ordered)
    method.after_mixing(t, cohort)
    cohort.classifier.follow(method.setup.config.classifier.ema)
    if cohort.generator is not None:
        cohort.generator.follow(method.setup.config.generator.ema)
    log["weights"] = weights.float()
    if accuracy is not None:
        log["generated_accuracy"] = accuracy
