"""What a run's readers want besides its figures: clients.json, once at the start, and confusion.json at the end.

    clients.json     "own": ids of the clients that this folder's figures are of, in their order (a peer: its own id)
                     "roles": a letter for every client of the graph;  "edges": [[i, j], …], i < j
                     "classes": names;  "labelled", "unlabelled": samples of each class, a row an own client;
                     "unknown": unlabelled samples of each own client whose class nobody knows
                     "samples": what the rows ("clients") and columns ("classes") of samples/*.png show
    confusion.json   "clients": [own][true class][answer], counts on the test set after the last round;
                     "mean": the same of the model with the mean of all weights

Both are extras: a reader does without them, and a folder of an older version has none.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from semidfl.cohort import each
from semidfl.learn.classifier import probabilities

if TYPE_CHECKING:
    from semidfl.cohort import Cohort
    from semidfl.data.shards import Index
    from semidfl.record.folder import RunFolder
    from semidfl.setup import Setup

__all__ = ["CELLS", "confusion", "sample_grid", "write_clients", "write_confusion"]

_EDGES = 20_000
"""more than these no picture shows: they are left out"""
CELLS = 2_000_000
"""of all matrices together; above it only the mean model's is kept"""
_ROWS, _COLUMNS = 20, 20


def sample_grid(clients: int, images: int, classes: int) -> tuple[int, int]:
    """Rows and columns of a picture of generated images: whole runs through the classes, where they fit."""
    columns = min(images, max(_COLUMNS, min(classes, 2 * _COLUMNS)))
    return min(clients, _ROWS), columns - columns % classes if columns > classes else columns


def write_clients(kept: "RunFolder", names: Sequence[str], setup: "Setup", cohort: "Cohort") -> None:
    """Who is there, who knows whom, who holds what."""
    graph, classes, held = setup.graph, len(names), cohort.shards
    count = sum(map(len, graph.neighbours)) // 2
    rows, columns = sample_grid(len(cohort.ids), setup.config.generator.samples, classes)
    labelled, _ = _by_class(held.labels, held.labelled, classes)
    unlabelled, unknown = _by_class(held.labels, held.unlabelled, classes)
    known = {
        "own": list(cohort.ids),
        "roles": graph.roles,
        "edges": graph.edges() if count <= _EDGES else [],
        "classes": list(names),
        "labelled": labelled,
        "unlabelled": unlabelled,
        "unknown": unknown,
        "samples": {"clients": list(cohort.ids[:rows]), "classes": [names[j % classes] for j in range(columns)]},
    }
    kept.write_text("clients.json", json.dumps(known, ensure_ascii=False) + "\n")


def _by_class(truth: Tensor, index: "Index", classes: int) -> tuple[list[list[int]], list[int]]:
    """Samples of each class at each client, and of no known class."""
    labels = [truth[row[:n]].cpu().numpy() for row, n in zip(index.table, index.held, strict=True)]
    counts = [np.bincount(x[x >= 0], minlength=classes).tolist() for x in labels]
    return counts, [int((x < 0).sum()) for x in labels]


def confusion(setup: "Setup", params: Tensor) -> Tensor:
    """How often every client's model (C, D) answers what, on the test set: (C, true class, answer)."""
    size, limit = setup.passes(len(params), setup.test_images.shape[1])
    classes = setup.space.classes
    truth = setup.test_labels[0] * classes

    def count(p: Tensor) -> Tensor:
        answers = probabilities(setup.classifier, setup.space, p, setup.test_images, limit).argmax(2)
        cells = torch.zeros(len(p), classes * classes, dtype=torch.int64, device=p.device)
        return cells.scatter_add_(1, truth + answers, torch.ones_like(answers))

    return each(count, size, params).reshape(-1, classes, classes)


def write_confusion(kept: "RunFolder", setup: "Setup", cohort: "Cohort") -> None:
    """One more test, whose answers are kept class by class."""
    params, classes = cohort.classifier.params, setup.space.classes
    found = {"mean": confusion(setup, params.mean(0, keepdim=True))[0].tolist()}
    if len(params) * classes**2 <= CELLS:
        found["clients"] = confusion(setup, params).tolist()
    kept.write_text("confusion.json", json.dumps(found) + "\n")
