"""The default data set, made here from small packages that look like the real ones."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from moe.data import catalogs, wheels
from moe.data.catalogs import Entry, add_wheel, make_examples, wheel_strings
from moe.data.cleaning import clean_pair, plain_text
from moe.data.pairs import Direction
from moe.data.sources import TfdsSource
from moe.data.split import near_duplicates
from moe.data.wheels import WHEELS, Wheel, fetch
from moe.errors import UserError

# Cleaning


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Open the <b>door</b>, <a href='x'>please</a>.", "Open the door, please."),
        ("First.<br/>Second.\n\n Third.", "First. Second. Third."),
        ("See [the docs]({url}) or [this](https://a.b/c).", "See the docs or this."),
        ("**Bold** and `code`", "Bold and code"),
        ("_Open &File at AT&amp;T", "Open File at AT&T"),
        ("打开(_O)", "打开"),
        ("Tom &amp; Jerry&nbsp;&ldquo;live&rdquo;", "Tom & Jerry “live”"),
        ("Hello { name }", "Hello {name}"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),  # Persian needs the non-joiner
    ],
)
def test_markup_goes_and_text_stays(text, plain):
    assert plain_text(text) == plain


@pytest.mark.parametrize(
    ("english", "translation", "lang"),
    [
        ("Hello {name}", "Hallo {name}", "de"),
        ("%(count)d of %(total)d files", "%(total)d Dateien, davon %(count)d", "de"),
        ("Go to https://a.b/c now", "Jetzt zu https://a.b/c gehen", "de"),
        ("50% done", "50% erledigt", "de"),
        ("Choose the default language of the program", "选择程序的默认语言", "zh-Hans"),
        ("Name", "Ime", "sr-Latn"),
    ],
)
def test_good_pairs_are_kept(english, translation, lang):
    assert clean_pair(english, translation, lang) == (english, translation)


@pytest.mark.parametrize(
    ("english", "translation", "lang"),
    [
        ("Hello {name}", "Hallo {nom}", "de"),
        ("Hello {name}", "Hallo", "de"),
        ("%(a)s and %(b)s", "%(a)s und %(a)s", "de"),
        ("Go to https://a.b/c now", "Jetzt zu https://a.b/d gehen", "de"),
        ("MQTT broker", "MQTT Broker", "de"),  # not translated
        ("", "leer", "de"),
        ("empty", " ", "de"),
        ("{name} ({host})", "{name}: {host}", "de"),  # no letters of its own
        ("Settings", "Settings 2", "ru"),  # not in the language's script
        ("Yes", "Ja, und noch ein ganzer langer Satz, der im Original nicht steht", "de"),
        ("word " * 61, "Wort " * 61, "de"),
    ],
)
def test_pairs_that_teach_something_wrong_are_dropped(english, translation, lang):
    assert clean_pair(english, translation, lang) is None


# Extraction


def make_wheel(folder: Path, name: str, files: dict[str, str]) -> Wheel:
    """A real, if small, wheel in `folder`, and its description."""
    info = f"{name}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (files | metadata).items():
            archive.writestr(member, text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(name=name, version="1.0", sha256=digest, license="MIT", homepage="https://a.b")


def po(**entries: str) -> str:
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    return header + "".join(f'\nmsgid "{a}"\nmsgstr "{b}"\n' for a, b in entries.items())


GETTEXT_FILES = {
    "app/locale/de/LC_MESSAGES/django.po": po(Door="Tür", Window="Fenster"),
    "app/locale/zh_Hans/LC_MESSAGES/django.po": po(Door="门"),
    "app/locale/en_GB/LC_MESSAGES/django.po": po(Door="Portal"),
    "app/locale/README.po": "not a catalogue",
}
JSON_FILES = {
    "home/lamp/translations/en.json": json.dumps({"a": {"b": "Door"}, "c": "Lamp", "d": 1}),
    "home/lamp/translations/de.json": json.dumps({"a": {"b": "Tor"}, "c": "Lampe", "x": "Rest"}),
    "home/lamp/translations/pt-BR.json": json.dumps({"c": "Lâmpada"}),
    "home/lamp/translations/sensor.en.json": json.dumps({"c": "Warm"}),
    "home/lamp/translations/sensor.de.json": json.dumps({"c": "Heiß"}),
    "home/sun/translations/en.json": json.dumps({"x": "Door"}),
    "home/sun/translations/de.json": json.dumps({"x": "Tor"}),
    "home/moon/translations/de.json": json.dumps({"x": "Mond"}),
}


def test_strings_of_gettext_catalogues_are_found_by_language(tmp_path):
    wheel = make_wheel(tmp_path, "app", GETTEXT_FILES)
    assert sorted(wheel_strings(tmp_path / wheel.filename)) == [
        ("de", "Door", "Tür"),
        ("de", "Window", "Fenster"),
        ("zh-Hans", "Door", "门"),
    ]


def test_strings_of_json_files_belong_together_by_their_keys(tmp_path):
    wheel = make_wheel(tmp_path, "home", JSON_FILES)
    assert sorted(wheel_strings(tmp_path / wheel.filename)) == [
        ("de", "Door", "Tor"),
        ("de", "Door", "Tor"),
        ("de", "Lamp", "Lampe"),
        ("de", "Warm", "Heiß"),
        ("pt-BR", "Lamp", "Lâmpada"),
    ]


def test_one_example_holds_the_commonest_translation_and_every_origin(tmp_path):
    entries: dict[str, Entry] = defaultdict(Entry)
    for name, files in (("app", GETTEXT_FILES), ("home", JSON_FILES)):
        wheel = make_wheel(tmp_path, name, files)
        add_wheel(entries, tmp_path / wheel.filename, name)
    examples = make_examples(entries, min_pairs=1)
    # Tür once, Tor twice.
    assert examples["Door"] == {
        "translations": {"en": "Door", "de": "Tor", "zh-Hans": "门"},
        "origin": "app home",
    }
    assert set(examples) == {"Door", "Window", "Lamp", "Warm"}
    # Of de there are four, of pt-BR and zh-Hans one each.
    few = make_examples(entries, min_pairs=2)
    assert {lang for example in few.values() for lang in example["translations"]} == {"en", "de"}


# Fetching: with the real pip, which finds its packages in a folder instead of the network


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_wheel_is_fetched_once(index, tmp_path):
    wheel = make_wheel(index, "app", GETTEXT_FILES)
    path = fetch(wheel, tmp_path / "downloads")
    assert path.read_bytes() == (index / wheel.filename).read_bytes()
    assert [found.name for found in (tmp_path / "downloads").iterdir()] == [wheel.filename]
    (index / wheel.filename).unlink()
    assert fetch(wheel, tmp_path / "downloads") == path


def test_damaged_download_is_fetched_again(index, tmp_path):
    wheel = make_wheel(index, "app", GETTEXT_FILES)
    damaged = tmp_path / "downloads" / wheel.filename
    damaged.parent.mkdir()
    damaged.write_bytes(b"half a file")
    assert fetch(wheel, damaged.parent).read_bytes() == (index / wheel.filename).read_bytes()


def test_wheel_with_another_hash_is_refused(index, tmp_path):
    wheel = make_wheel(index, "app", GETTEXT_FILES)
    make_wheel(index, "app", {"app/evil.py": "import os"})
    with pytest.raises(UserError, match=r"got no app 1\.0 \(.*(HASHES|hash)"):
        fetch(wheel, tmp_path / "downloads")
    assert list((tmp_path / "downloads").iterdir()) == []


def test_without_network_the_package_the_reason_and_the_cure_are_named(tmp_path, monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "1",
        "PIP_NO_CACHE_DIR": "1",
        "no_proxy": "*",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        TfdsSource(data_dir=str(tmp_path)).pairs("train")
    message = str(error.value)
    assert f"got no {WHEELS[0].name} {WHEELS[0].version} (Connection refused)" in message
    assert f"put {WHEELS[0].filename} into {tmp_path}/downloads/moe_catalogs" in message
    assert "JsonLines" in message
    assert list((tmp_path / "moe_catalogs").iterdir()) == []


# The whole builder, on packages of its own


LETTERS = "abcdefghijklmnopqrstuvw"


def random_strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join("".join(rng.choices(LETTERS, k=rng.randint(3, 8))) for _ in range(4))
        for _ in range(count)
    ]


@pytest.fixture
def small_catalogs(index, monkeypatch):
    """Two packages of 150 and 100 strings that share 50, with 10 near-copies; three languages."""
    first = random_strings(150, seed=1)
    second = first[:50] + random_strings(50, seed=2)
    first += [text + " 2" for text in first[:10]]
    gettext = {
        f"app/locale/{lang}/LC_MESSAGES/django.po": po(**{t: f"{t} {lang}" for t in first[:most]})
        for lang, most in (("de", 160), ("fr", 160), ("zz", 5))
    }
    translations = {
        f"home/x/translations/{lang}.json": json.dumps(
            {str(i): f"{text} {lang}".removesuffix(" en") for i, text in enumerate(second)}
        )
        for lang in ("en", "de", "pt-BR")
    }
    pins = (make_wheel(index, "app", gettext), make_wheel(index, "home", translations))
    monkeypatch.setattr(catalogs, "WHEELS", pins)
    monkeypatch.setattr(catalogs, "MIN_PAIRS", 20)
    monkeypatch.setattr(catalogs, "HELD_OUT", 0.2)


def test_builder_prepares_array_records_that_are_read_without_tensorflow(
    small_catalogs, tmp_path, capsys
):
    source = TfdsSource(data_dir=str(tmp_path / "data"))
    splits = {split: source.pairs(split) for split in ("train", "validation", "test")}
    for pairs in splits.values():
        assert {d.target_lang for d in pairs if d.source_lang == "en"} == {"de", "fr", "pt-BR"}
        for direction, of_direction in pairs.items():
            assert {pair.direction for pair in of_direction} == {direction}
            assert len(of_direction) == len(pairs[direction.reverse]) > 0
            for pair in of_direction:
                english, other = sorted((pair.source, pair.target), key=len)
                assert other == f"{english} {({*direction} - {'en'}).pop()}"
    english = {
        split: {pair.source for d, of in pairs.items() if d.source_lang == "en" for pair in of}
        for split, pairs in splits.items()
    }
    assert not near_duplicates(english["train"], [*english["test"], *english["validation"]])
    assert not english["train"] & (english["test"] | english["validation"])
    assert 190 <= sum(map(len, english.values())) <= 210
    assert "tensorflow" not in sys.modules
    assert capsys.readouterr().out == ""


def test_licence_and_homepage_of_every_package_are_in_the_data_set(small_catalogs, tmp_path):
    TfdsSource(data_dir=str(tmp_path / "data")).pairs("test")
    info = tfds.builder("moe_catalogs", data_dir=tmp_path / "data").info
    assert info.redistribution_info.license == "app: MIT; home: MIT"
    assert "- app 1.0, https://a.b, license MIT" in info.description
    records = tfds.builder("moe_catalogs", data_dir=tmp_path / "data").as_data_source("train")
    origins = {record["origin"].decode() for record in records}
    assert origins == {"app", "home", "app home"}


def test_prepared_data_is_used_again_without_packages(small_catalogs, index, tmp_path):
    source = TfdsSource(data_dir=str(tmp_path / "data"))
    before = source.pairs("test")[Direction("en", "de")]
    for path in [*index.iterdir(), *(tmp_path / "data/downloads/moe_catalogs").iterdir()]:
        path.unlink()
    assert list(source.pairs("test")[Direction("en", "de")]) == list(before)


def test_failure_in_the_middle_leaves_nothing_half_prepared(small_catalogs, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise UserError("broken must be whole: got half. Try again.")

    monkeypatch.setattr(catalogs, "make_examples", fail)
    with pytest.raises(UserError, match="broken must be whole"):
        TfdsSource(data_dir=str(tmp_path / "data")).pairs("train")
    assert list((tmp_path / "data/moe_catalogs").iterdir()) == []


def test_tfds_data_dir_is_honoured(tmp_path):
    code = "import moe.data.catalogs as c; print(c.MoeCatalogs().data_dir)"
    environment = {"TFDS_DATA_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert found.stdout.decode().strip() == f"{tmp_path}/moe_catalogs/1.0.0"


def test_reason_of_a_failed_download_is_short():
    assert wheels._reason("WARNING: [Errno 111] Connection refused')': /x\nERROR: No match.") == (
        "Connection refused"
    )
    assert wheels._reason("/usr/bin/python: No module named pip\n") == (
        "/usr/bin/python: No module named pip"
    )
    assert wheels._reason("") == "pip failed"


@pytest.mark.slow
def test_real_catalogues_hold_what_is_promised(tmp_path):
    source = TfdsSource(data_dir=str(tmp_path))
    splits = {split: source.pairs(split) for split in ("train", "validation", "test")}
    counts = {d.target_lang: len(p) for d, p in splits["train"].items() if d.source_lang == "en"}
    assert len(counts) >= 20
    assert sum(counts.values()) >= 50_000
    assert counts["de"] > 10_000
    english = {
        split: {pair.source for d, of in pairs.items() if d.source_lang == "en" for pair in of}
        for split, pairs in splits.items()
    }
    assert len(english["test"]) >= 300
    assert len(english["validation"]) >= 300
    assert all(len(text.split()) >= 2 for text in english["test"])
    assert not near_duplicates(english["train"], [*english["test"], *english["validation"]])
    assert not near_duplicates(english["validation"], english["test"])
