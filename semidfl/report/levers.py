"""What the `tuned` recipe does otherwise than the paper's: its levers, each with the fields that take it back."""

from collections.abc import Iterator
from typing import Any

from semidfl.config import leaves
from semidfl.recipes import paper, tuned

__all__ = ["ALL", "LEVERS", "levers"]

ALL = "all levers"
"""the recipe as it is"""

LEVERS: dict[str, tuple[str, ...]] = {
    "weak augmentation that fits": ("augment.pad", "augment.flip"),
    "strong augmentation": ("augment.strong",),
    "Nesterov's momentum": ("classifier.nesterov",),
    "weight decay": ("classifier.weight_decay",),
    "cosine rate": ("classifier.schedule",),
    "a smaller rate": ("classifier.lr",),
    "gradients cut": ("classifier.grad_clip",),
    "standardised filters": ("classifier.standardise",),
    "turned images": ("classifier.turns",),
    "a step for each source": ("classifier.loss",),
    "mixed momentum": ("aggregation.momentum",),
    "more say for who learns more": ("aggregation.idle",),
    "samples as they are (no MixUp)": ("mixup.beta",),
    "labels by an average": ("classifier.ema",),
    "labels after a while": ("pseudo.start",),
    "hard labels, one threshold": ("pseudo.adaptive", "pseudo.labels", "pseudo.masked", "pseudo.threshold"),
    "alignment": ("pseudo.align", "pseudo.prior"),
    "labels for some": ("pseudo.pool",),
    "no generator": ("generator.kind",),
    "generator: of all images": ("generator.all_images", "generator.label_dropout"),
    "generator: noise levels weighed": ("generator.min_snr",),
    "generator: sampled from an average": ("generator.ema",),
    "generator: less guidance": ("generator.guidance",),
    "generator: what the classifier agrees with": ("generator.keep_agreed",),
    "generator: for classes that lack": ("generator.fill",),
    "generator: its pace": tuple(
        f"generator.{field}" for field in ("iterations", "start", "every", "samples", "validation", "sampler_steps")
    ),
    "generator: its network": tuple(f"generator.{field}" for field in ("width", "patch", "levels", "lr", "gan_lr")),
}
"""in the order in which a round needs them"""


def levers(dataset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The levers of a data set's recipe, and what takes each back: the paper's values; last, to have no generator.

    Where the recipe has none, that is a lever like the others.
    """
    ours, theirs = dict(leaves(tuned(dataset))), dict(leaves(paper(dataset)))
    yield ALL, {}
    for lever, fields in LEVERS.items():
        if back := {field: theirs[field] for field in fields if ours[field] != theirs[field]}:
            yield lever, back
    if ours["generator.kind"] != "none":
        yield "the generator", {"generator.kind": "none"}
