"""The source of gettext catalogues: what it yields, what it says about a bad file."""

from __future__ import annotations

import polib
import pytest

from moe.data.sources import Gettext
from moe.errors import UserError
from tests.data.written import ALL_TRAIN, EN_DE, write

CATALOGUE = """msgid ""
msgstr ""
"Content-Type: text/plain; charset={charset}\\n"
"Language: {language}\\n"

msgid "Open the <b>door</b>"
msgstr "{door}"

#, fuzzy
msgid "Fuzzy entry"
msgstr "Unsicher"

msgid "Not translated"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] "eine Datei"
msgstr[1] "%d Dateien"

#~ msgid "Obsolete entry"
#~ msgstr "Veraltet"
"""


def catalogue(language: str, door: str, charset: str = "UTF-8") -> str:
    return CATALOGUE.format(language=language, door=door, charset=charset)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_gettext_reads_approved_entries_of_a_tree(tmp_path, ending):
    write(tmp_path / f"locale/de/LC_MESSAGES/app.po{ending}", catalogue("", "Öffne die Tür"))
    write(tmp_path / f"locale/en_GB/LC_MESSAGES/app.po{ending}", catalogue("", "Open ye door"))
    write(tmp_path / f"po/pt_BR.po{ending}", catalogue("", "Abra a porta"))
    write(tmp_path / f"po/francais.po{ending}", catalogue("fr", "Ouvrez la porte"))
    pairs = Gettext(path=str(tmp_path), **ALL_TRAIN).pairs("train")
    assert {str(d): [p.target for p in of] for d, of in pairs.items() if d.source_lang == "en"} == {
        "en-de": ["Öffne die Tür"],
        "en-pt-BR": ["Abra a porta"],
        "en-fr": ["Ouvrez la porte"],
    }
    assert pairs[EN_DE][0].source == "Open the door"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_gettext_reads_mo_files_but_not_beside_a_po(tmp_path, ending):
    folder = tmp_path / "de/LC_MESSAGES"
    compiled = polib.pofile(catalogue("", "Tür auf")).to_binary()
    write(folder / f"other.mo{ending}", compiled)
    write(folder / f"app.mo{ending}", compiled)
    write(folder / "app.po", catalogue("", "Öffne die Tür"))
    pairs = Gettext(path=str(tmp_path), **ALL_TRAIN).pairs("train")
    assert sorted(pair.target for pair in pairs[EN_DE]) == ["Tür auf", "Öffne die Tür"]


def test_gettext_decodes_as_the_header_says(tmp_path):
    text = catalogue("", "Öffne die Tür", charset="ISO-8859-1")
    path = write(tmp_path / "de.po", text.encode("latin1"))
    assert Gettext(path=path, **ALL_TRAIN).pairs("train")[EN_DE][0].target == "Öffne die Tür"


def test_gettext_with_a_false_charset_names_line_and_byte(tmp_path):
    write(tmp_path / "de.po", catalogue("", "Öffne die Tür").encode("latin1"))
    with pytest.raises(UserError, match=r"line 7 of .*de\.po must be in .*utf-8.*the byte 0xd6"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_malformed_catalogue_is_named_with_its_line(tmp_path):
    write(tmp_path / "de.po", 'msgid "a"\nmsgstr "b"\nmsgsrt "c"\n')
    with pytest.raises(UserError, match=r"line 3 of .*de\.po must be a gettext catalogue"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_truncated_mo_file_is_named(tmp_path):
    compiled = polib.pofile(catalogue("", "Tür auf")).to_binary()
    for size in (4, 20):
        write(tmp_path / "de.mo", compiled[:size])
        with pytest.raises(UserError, match=r"de\.mo must be"):
            Gettext(path=str(tmp_path)).pairs("train")


def test_folder_without_catalogues_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"path must hold \.po or \.mo files: got .*which has none"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_catalogue_of_unknown_language_is_named(tmp_path):
    write(tmp_path / "application.po", catalogue("", "Öffne die Tür"))
    with pytest.raises(UserError, match=r"application\.po must say its language"):
        Gettext(path=str(tmp_path)).pairs("train")
