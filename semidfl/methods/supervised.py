"""The two bounds: the few labels only (DFL-LB), and all data labelled (DFL-UB)."""

from semidfl.methods.base import Method

__all__ = ["LowerBound", "UpperBound"]


class LowerBound(Method):
    """DFL-LB: unlabelled data is not used; clients without labels only aggregate."""


class UpperBound(Method):
    """DFL-UB: every sample is labelled and every client is an L-client."""

    all_labelled = True
