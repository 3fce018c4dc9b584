"""The progress bar of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class _SentencesPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f} sentences/s")


@contextmanager
def sentences_progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; yields the function to call with the number of sentences just done."""
    columns = (
        TextColumn("translating"),
        BarColumn(),
        MofNCompleteColumn(),
        _SentencesPerSecond(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("translating", total=total)
        yield lambda count: progress.advance(task, count)
