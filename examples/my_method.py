"""A method of one's own: pseudo-labels by the own classifier alone, kept if it is sure twice in a row."""

import torch
from torch.nn import functional as F

from semidfl import Method
from semidfl.cohort import each
from semidfl.learn.batch import PseudoLabels
from semidfl.learn.classifier import probabilities


class Stubborn(Method):
    def pseudo_label(self, t, cohort, exchange, log):
        setup, held = self.setup, cohort.shards
        size = setup.chunk(setup.classifier, len(cohort.ids))

        def predict(params, shards):
            images = shards.images[shards.unlabelled.table]
            p = probabilities(setup.classifier, setup.space, params, images, setup.limit(setup.classifier, size))
            return F.pad(p, (0, 0, 0, held.unlabelled.table.shape[1] - p.shape[1]))

        confidence, best = each(predict, size, cohort.classifier.params, held).max(2)
        sure = (confidence > self.setup.config.pseudo.threshold) & held.unlabelled.valid()
        before = cohort.memory.get("last choice", torch.full_like(best, -1))
        cohort.memory["last choice"] = torch.where(sure, best, -1)  # saved with every checkpoint
        kept = sure & (best == before)
        log["pseudo_labels"] = kept.sum(1)
        return PseudoLabels(F.one_hot(best, setup.space.classes).float(), kept)
