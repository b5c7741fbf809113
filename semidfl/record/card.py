"""The model card: what a run trained on, how, how well, and what its models are and are not good for."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from semidfl.config import Config, leaves

if TYPE_CHECKING:
    from semidfl.cohort import Cohort
    from semidfl.setup import Setup

__all__ = ["model_card", "tested_clients"]

_ROLES = {"L": "labelled only (L)", "M": "labelled and unlabelled (M)", "U": "unlabelled only (U)"}
_FEW = 100
"""test images below which an accuracy says little"""


def model_card(setup: "Setup", cohort: "Cohort", summary: Mapping[str, Any], mean_model: float) -> str:
    """Markdown, from what the run knows by itself; `mean_model`: accuracy of the mean of its clients' weights.

    A peer of a federation knows its own data and scores only; one without held-out labels has a `mean_model` of NaN.
    """
    config, space = setup.config, setup.space
    names = space.names or tuple(map(str, range(space.classes)))
    tested, who = setup.test_labels.numel(), "no client" if len(cohort.ids) == setup.clients else "this peer never"
    parts = [
        f"# Model card: {_name(summary)}",
        f"{_network(config)} for {space.width}x{space.height} {'grey' if space.channels == 1 else 'colour'} images in "
        f"{space.classes} classes ({_listed(names)}), trained by {setup.clients} clients that share models and no "
        f"data ([SemiDFL](https://doi.org/10.1609/aaai.v39i18.34090), method `{config.method}`).",
        "## Data",
        _data(setup, cohort),
        _labels(cohort, names),
        f"Test part: {tested} images that {who} trained on.",
        "## Accuracy",
        _accuracy(summary, mean_model, tested, space.classes),
        "## Recipe",
        _recipe(config, summary),
        "## Intended use",
        "To sort images of the same origin and kind as the training data into the classes above. "
        "Fill in for your own case: who may use it, for which decisions, who answers for them.",
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(config, any(cohort.shards.unlabelled.held))),
        "## Use it",
        f"```\nsemidfl predict runs/{_name(summary)} --input FOLDER_OR_IMAGE\n"
        f"semidfl export runs/{_name(summary)} --format onnx\n```\n"
        "`models/` holds one file a client; the commands use the mean of all unless `--client N` says otherwise.",
    ]
    return "\n\n".join(parts) + "\n"


def _name(summary: Mapping[str, Any]) -> str:
    """As the run folder is called, unless the user chose another."""
    return "-".join(summary[key] for key in ("federation", "name") if key in summary)


def tested_clients(summary: Mapping[str, Any]) -> list[float]:
    """The accuracy of each client of a run, or of a peer on its own held-out labels: none where it has none."""
    found = summary.get("per_client", summary.get("held_out_accuracy"))
    return [value or 0.0 for value in found or []]  # a model that gives NaN knows nothing


def _network(config: Config) -> str:
    return {"cnn": "A small CNN", "resnet18": "A ResNet-18 with group normalisation"}[config.classifier.model]


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _data(setup: "Setup", cohort: "Cohort") -> str:
    """A row a role: how many clients, how many images."""
    labelled, unlabelled = cohort.shards.labelled.held, cohort.shards.unlabelled.held
    whole = len(cohort.ids) == setup.clients
    lines = [
        f"Data set: `{setup.config.data.dataset}`."
        if whole
        else "What this peer holds; of the others' data it knows nothing.",
        "",
        "| role | clients | labelled images | unlabelled images |",
    ]
    lines.append("|---|---|---|---|")
    rows = {letter: [k for k, i in enumerate(cohort.ids) if setup.graph.roles[i] == letter] for letter in "LMU"}
    for letter, some in rows.items():
        if some:
            sums = [sum(held[k] for k in some) for held in (labelled, unlabelled)]
            lines.append(f"| {_ROLES[letter]} | {len(some)} | {sums[0]} | {sums[1]} |")
    lines.append(f"| all | {len(cohort.ids)} | {sum(labelled)} | {sum(unlabelled)} |")
    return "\n".join(lines)


def _labels(cohort: "Cohort", names: Sequence[str]) -> str:
    held = cohort.shards.labelled
    labels = cohort.shards.labels[held.table][held.valid()].cpu().numpy()
    counts = np.bincount(labels, minlength=len(names))
    least, most = int(counts.argmin()), int(counts.argmax())
    return f"Labels a class: from {counts[least]} ({names[least]}) to {counts[most]} ({names[most]})."


def _accuracy(summary: Mapping[str, Any], mean_model: float, tested: int, classes: int) -> str:
    clients = tested_clients(summary)
    if not clients:
        judged = summary.get("generated_accuracy")
        known = f" On samples of its own generator: {100 * judged[0]:.2f} %." if judged else ""
        return f"Not known: this peer has no held-out labels.{known}"
    rough = f" {tested} test images are few: a single one is {100 / tested:.1f} points." if tested < _FEW else ""
    return (
        f"**{100 * float(np.mean(clients)):.2f} %**, mean over the clients and the last tests "
        f"(over the clients: standard deviation {100 * float(np.std(clients)):.2f}, "
        f"lowest {100 * min(clients):.2f}, highest {100 * max(clients):.2f}). "
        f"The mean of their weights, which `predict` and `export` use, has {100 * mean_model:.2f} % "
        f"after the last round; guessing gives {100 / classes:.1f} % if classes are equally frequent.{rough}"
    )


def _recipe(config: Config, summary: Mapping[str, Any]) -> str:
    from semidfl import __version__

    plain = dict(leaves(Config()))
    changed = [f"`{path} = {value!r}`" for path, value in leaves(config) if value != plain[path] and path != "name"]
    return (
        f"{summary['rounds']} rounds in {summary['seconds']:.0f} s on {summary['device']}, seed {config.seed}, "
        f"config {summary['config']}; semidfl {__version__}, torch {summary['versions']['torch']}. "
        f"Where it differs from the paper's recipe for MNIST: {', '.join(changed) or 'nowhere'}. "
        "All settings are in config.toml."
    )


def _limits(config: Config, guessed: bool) -> list[str]:
    lines = [
        "Any image gets one of these classes, also one that shows something else; probabilities are not calibrated.",
        "The accuracy holds for images drawn like the test part; other devices, sites or times may differ.",
        "No client's images left it, but a trained model can give hints about what it was trained on.",
    ]
    if guessed and config.method not in ("dfl-lb", "dfl-ub"):
        lines.append("Images without a label were learnt with one that the models guessed, mistakes included.")
    if config.generator.kind != "none" and config.method == "semidfl":
        lines.append("The generator in models/ draws images like those of training: share it as you would share them.")
    return lines
