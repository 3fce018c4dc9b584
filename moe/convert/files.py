"""Arrays by name: in files, and below a prefix."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe.errors import UserError

Tensors = dict[str, np.ndarray]


def read_tensors(path: str | Path, *, prefix: str = "") -> dict[str, np.ndarray]:
    """Arrays of a safetensors file, or of all such files in a folder, whose names start with prefix.

    Only what is asked for is read. Needs the package safetensors.

    Args:
      path: the file, or the folder of a checkpoint in several files.
      prefix: of the names; they are returned whole, so give it to `read_layer` too.

    Returns:
      Arrays by name, bfloat16 included.

    Raises:
      UserError: no file, or no name with the prefix.
    """
    from safetensors import safe_open

    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"path must be a safetensors file or a folder of them: got {str(path)!r}. "
            "Look for the checkpoint's files."
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            names = [name for name in opened.keys() if name.startswith(dotted(prefix))]  # noqa: SIM118
            tensors |= {name: opened.get_tensor(name) for name in names}
    if not tensors:
        raise UserError(
            f"prefix must start some name in {str(path)!r}: got {prefix!r}. "
            "It ends before the layer's own names, such as 'experts'."
        )
    return tensors


def below(prefix: str, tensors: Tensors) -> dict[str, np.ndarray]:
    """The tensors whose names start with the prefix, by the rest of their names."""
    start = dotted(prefix)
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }


def dotted(prefix: str) -> str:
    """The prefix with the dot that parts it from the rest of a name, unless it is empty."""
    return prefix if prefix.endswith(".") or not prefix else prefix + "."
