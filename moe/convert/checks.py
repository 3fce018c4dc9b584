"""Whether tensors are those of one layer: all names of its family, no others, and one set of sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moe.convert.families import Convention
from moe.convert.files import Tensors
from moe.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a layer's tensors say about its sizes; `d_shared` is H of the shared expert, 0 without."""

    num_experts: int
    d_model: int
    d_hidden: int
    d_shared: int


def checked_sizes(tensors: Tensors, convention: Convention) -> Sizes:
    """The sizes, by the router and the first expert; all other tensors must agree with them.

    Raises:
      UserError: names that are missing or unknown, another shape, or a type we do not keep.
    """
    sizes = _sizes(tensors, convention)
    shapes = _shapes(convention, sizes)
    refuse_missing(tensors, shapes)
    unknown = {name: str(value.shape) for name, value in tensors.items() if name not in shapes}
    _refuse("hold nothing but the layer", unknown, "Check family and prefix.")
    refuse_misshaped(
        {
            name: f"{tensors[name].shape}, not {shape}"
            for name, shape in shapes.items()
            if tensors[name].shape != shape
        }
    )
    floats = ("float32", "float16", "bfloat16")  # by name: numpy itself has no bfloat16
    other = {n: str(v.dtype) for n, v in tensors.items() if v.dtype.name not in floats}
    _refuse(f"be of a type in {floats}", other, "Convert them, or undo their quantization.")
    return sizes


def refuse_missing(tensors: Tensors, names: Iterable[str]) -> None:
    """Raises a UserError that says which of the names the tensors lack, if any."""
    missing = {name: "missing" for name in names if name not in tensors}
    _refuse("hold the whole layer", missing, "Check family and prefix.")


def refuse_misshaped(offenders: dict[str, str]) -> None:
    """Raises a UserError that says what shapes they have, if there are any."""
    rule = "have the sizes of the router and of the first expert"
    _refuse(rule, offenders, "Check that all are of one layer.")


def _sizes(tensors: Tensors, convention: Convention) -> Sizes:
    router = convention.names["router.kernel_ME"]
    first = convention.names["experts.wi_EMH"].format(e=0)
    shared = convention.names.get("ffn.wi_MH")
    sources = [name for name in (router, first, shared) if name is not None]
    refuse_missing(tensors, sources)
    shapes = {name: tensors[name].shape for name in sources}
    refuse_misshaped({n: f"{s}, not a matrix" for n, s in shapes.items() if len(s) != 2})
    num_experts, d_model = shapes[router]
    return Sizes(
        num_experts=num_experts,
        d_model=d_model,
        d_hidden=shapes[first][0],
        d_shared=0 if shared is None else shapes[shared][0],
    )


def _shapes(convention: Convention, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every name of a layer of these sizes, with its shape: our letters, read backwards."""
    shapes: dict[str, tuple[int, ...]] = {}
    for ours, theirs in convention.names.items():
        d_hidden = sizes.d_shared if ours.startswith("ffn.") else sizes.d_hidden
        size_of = {"E": sizes.num_experts, "M": sizes.d_model, "H": d_hidden, "1": 1}
        letters = ours.rpartition("_")[2]
        if "{e}" in theirs:
            shape = tuple(size_of[letter] for letter in reversed(letters.removeprefix("E")))
            shapes |= {theirs.format(e=e): shape for e in range(sizes.num_experts)}
        else:
            shapes[theirs] = tuple(size_of[letter] for letter in reversed(letters))
    return shapes


def _refuse(rule: str, offenders: dict[str, str], cure: str, show: int = 6) -> None:
    """Raises a UserError that names the first few offenders, if there are any."""
    if not offenders:
        return
    named = ", ".join(f"{name} ({what})" for name, what in list(offenders.items())[:show])
    more = f" and {len(offenders) - show} more" if len(offenders) > show else ""
    raise UserError(f"tensors must {rule}: got {named}{more}. {cure}")
