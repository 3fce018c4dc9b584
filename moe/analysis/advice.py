"""What a finding is, from where on there is one, and the words it is made of."""

from __future__ import annotations

import dataclasses
from typing import Literal

Severity = Literal["fix", "watch", "note"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run that a finding may advise to change; None is unknown."""

    capacity_factor: float | None = None
    balance_weight: float | None = None
    z_weight: float | None = None
    batch_priority: bool | None = None
    temperature: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From where on a number is worth a sentence; the page prints them."""

    watch_imbalance: float = 1.5
    """Busiest expert over the mean: worth an eye."""
    fix_imbalance: float = 2.0
    """Busiest expert over the mean: to be mended. Not to drop any of its choices takes twice the
    room, and half of all slots stay empty."""
    dead: float = 0.1
    """An expert below this part of its fair share, 1 / E, is called dead."""
    watch_drop_rate: float = 0.05
    """Fraction of choices dropped at the end of training: worth an eye."""
    fix_drop_rate: float = 0.15
    """The same: to be mended. A choice of ours, like 5 %; no experiment stands behind either."""
    growth: float = 1.25
    """Imbalance at the end of training over that in the middle: worth an eye."""
    undecided: float = 0.98
    """Router entropy over log E above which the router hardly tells its experts apart."""
    certain: float = 0.05
    """Router entropy over log E below which the second choice of a token hardly counts."""
    specialised_bits: float = 0.1
    """Mutual information of direction and expert that is worth a note."""
    choices_per_expert: int = 100
    """Below so many measured choices for each expert the shares are mostly chance (10 %)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know: where, what, the evidence for it and what to do.

    Attributes:
      severity: "fix" costs quality or speed now, "watch" may, "note" is only worth knowing.
      stack, layer: where to look.
      title: what is the case, half a sentence.
      evidence: the numbers behind it.
      cure: what to change; names of settings stand in backticks.
    """

    severity: Severity
    stack: str
    layer: int
    title: str
    evidence: str
    cure: str

    @property
    def where(self) -> str:
        """The layer as people call it: "decoder layer 2"."""
        return f"{self.stack} layer {self.layer}"


def graded(value: float, watch: float, fix: float) -> Severity | None:
    """The severity of a value that had better be small."""
    if value >= fix:
        return "fix"
    return "watch" if value >= watch else None


def raised(name: str, value: float | None, *, at_zero: float) -> str:
    """Advice to double a setting, or to start with `at_zero`."""
    if value is None:
        return f"Raise `{name}`"
    return f"Raise `{name}` from {value:g} to {value * 2 or at_zero:g}"


def now(value: object) -> str:
    """The value that a setting has, where it is known."""
    return "" if value is None else f" (now {value})"


def percent(fraction: float) -> str:
    """A fraction as people read it: "12.5 %", "0.3 %"."""
    return f"{100 * fraction:.1f} %"
