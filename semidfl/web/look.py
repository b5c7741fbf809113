"""Colours of the page, light and dark. Hues are Okabe and Ito's, told apart by colour-blind readers."""

from dataclasses import dataclass

__all__ = ["DARK", "FONT", "LIGHT", "MEANINGS", "Look"]

FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
"""said in full: a canvas does not know `inherit`"""
MEANINGS = {"L": "labels", "M": "some labels", "U": "no label"}


@dataclass(frozen=True)
class Look:
    """One theme, as charts need it; the page's own style sheet has the same colours as variables."""

    dark: bool
    ink: str
    faint: str
    line: str
    card: str
    roles: dict[str, str]
    series: tuple[str, ...]
    ramp: tuple[str, ...]
    """from nothing to most"""
    right: str
    wrong: str
    alarm: str


LIGHT = Look(
    dark=False,
    ink="#1b2430",
    faint="#5b6776",
    line="#e3e8ee",
    card="#ffffff",
    roles={"L": "#0072B2", "M": "#E69F00", "U": "#8b96a5"},
    series=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1b2430"),
    ramp=("#f2f6fa", "#9ccbe6", "#3b93c6", "#00598c", "#002b45"),
    right="#0072B2",
    wrong="#D55E00",
    alarm="#C0392B",
)
DARK = Look(
    dark=True,
    ink="#e8edf3",
    faint="#9aa7b7",
    line="#2a3542",
    card="#171f29",
    roles={"L": "#56B4E9", "M": "#F0B43C", "U": "#8592a3"},
    series=("#56B4E9", "#F08A4B", "#2FC49A", "#E3A0C8", "#F0C24B", "#8fd0f5", "#e8edf3"),
    ramp=("#1d2733", "#1f4f73", "#2f86b8", "#79c2ea", "#dff3ff"),
    right="#56B4E9",
    wrong="#F08A4B",
    alarm="#ff6b5e",
)
