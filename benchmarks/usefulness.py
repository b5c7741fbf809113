"""What a run's generated images teach: a classifier that has seen nothing else, tested on real ones.

    python benchmarks/usefulness.py RUN [--count 500] [--rounds 100]

It draws COUNT images of each class from the run's consensus generator and trains the run's kind of classifier on them
from its first weights, in ROUNDS rounds of the run's steps by one client alone. For comparison, the same with as many
real training images, all labelled. Where the run has put samples aside, those are what it is tested on.

Steps are on larger batches than a run's: with ten samples, and no neighbours to average with, they are too rough.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from semidfl.config import Config, override
from semidfl.data.dataset import Dataset, Images, Labels
from semidfl.data.sources import load
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.use.generate import draw
from semidfl.use.model import load_generator


def taught_by(config: Config, data: Dataset, images: Images, labels: Labels, rounds: int) -> float:
    """Accuracy of the last test, in percent, of one client that has these samples."""
    alone = {"method": "dfl-ub", "graph.topology": "full", "graph.clients": 1, "graph.roles": "", "attack.kind": "none"}
    steps = {"classifier.batch": 64, "classifier.schedule": "cosine", "classifier.weight_decay": 5e-4}
    fast = {"compute.precision": "auto", "rounds": rounds, "evaluation.every": rounds}
    config = override(config, alone | steps | fast)
    method, cohort = prepare(config, replace(data, train_images=images, train_labels=labels, sites=(), owners=None))
    *_, record = train(config, method, cohort, MemoryExchange(cohort.ids))
    return 100 * float(record["accuracy"][0])


def as_many_real(data: Dataset, count: int, seed: int) -> tuple[Images, Labels]:
    """So many training samples of each class, or all that there are."""
    mixed = np.random.default_rng(seed).permutation(len(data.train_labels))
    places = [mixed[data.train_labels[mixed] == k][:count] for k in range(len(data.classes))]
    chosen = np.concatenate(places)
    return data.train_images[chosen], data.train_labels[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    trained = load_generator(asked.run, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config, classes = trained.config, trained.space.classes
    data = load(config.data.dataset, config.data, config.seed)
    made = draw(trained, range(classes), asked.count).reshape(-1, *trained.space.shape)
    samples = {"generated": (made, np.arange(classes).repeat(asked.count))}
    samples["real"] = as_many_real(data, asked.count, config.seed)
    for kind, (images, labels) in samples.items():
        accuracy = taught_by(config, data, images, labels, asked.rounds)
        print(f"{len(labels)} {kind} images: {accuracy:.2f} %", flush=True)


if __name__ == "__main__":
    main()
