"""An experiment file and the command line's fields over it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from moe.errors import UserError

if TYPE_CHECKING:
    from moe.training import TrainConfig


def read_config(
    path: str,
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    model: str | None = None,
) -> TrainConfig:
    """The configuration of an experiment file with the fields of `arguments` in place of its own."""
    from moe.training import TrainConfig

    return tyro.cli(
        TrainConfig,
        config=(tyro.conf.AvoidSubcommands,),
        prog=prog,
        description=description,
        default=read_experiment(Path(path), model),
        args=arguments,
    )


def read_experiment(path: Path, model: str | None = None) -> TrainConfig:
    """What `config()` of an experiment file returns, or `config(model)` where a name is given.

    Raises:
      UserError: no such file, no `config()` in it, or one that returns something else.
    """
    if not path.is_file() or path.suffix != ".py":
        raise UserError(
            f"experiment must be a Python file that exists: got {path}. See the folder experiments."
        )
    from moe.training import TrainConfig

    config = _function_config(path)
    if config is not None and model is not None and not inspect.signature(config).parameters:
        raise UserError(
            f"model must be left out where config() takes none: got {model!r} for {path}. "
            "Leave it out, or use --model.FIELD for a field."
        )
    names = () if model is None else (model,)
    result = None if config is None else config(*names)
    if not isinstance(result, TrainConfig):
        found = "no config()" if config is None else f"config() -> {type(result).__name__}"
        raise UserError(
            f"experiment must define config() that returns a TrainConfig: got {path} with {found}. "
            "See experiments/generated.py."
        )
    return result


def _function_config(path: Path) -> Callable[..., TrainConfig] | None:
    """The function `config` of a file, which is run for it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: it may import its neighbours
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    return config if callable(config) else None
