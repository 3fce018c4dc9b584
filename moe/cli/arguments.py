"""What several commands take, and the checks of it that need no run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from moe.errors import UserError

if TYPE_CHECKING:
    from moe.decoding import DecodingConfig

RunFolder = Annotated[str, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamArguments:
    """How a command searches for translations."""

    beam_size: int = 4
    """Hypotheses kept for each sentence; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length normalisation; larger favours longer translations."""

    def decoding_config(self) -> DecodingConfig:
        """The same for `moe.decoding`, which checks the values."""
        from moe.decoding import DecodingConfig

        return DecodingConfig(beam_size=self.beam_size, length_penalty=self.length_penalty)


def checked_split(split: str):
    """The split, if there is one of that name."""
    if split not in ("train", "validation", "test"):
        raise UserError(f"split must be train, validation or test: got {split!r}. Choose one.")
    return split


def check_folder_exists(name: str, path: str | None) -> None:
    """Refuses the file of option `name` before the work is done, where it could not be written."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UserError(
            f"{name} must be in a folder that exists: got {path}. Make the folder first."
        )
