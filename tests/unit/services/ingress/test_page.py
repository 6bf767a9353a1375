"""The page's files hang together and load nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from services.ingress.page_files import FOLDER

NAMES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Collects what the tests ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text("index.html"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]


class Labels(HTMLParser):
    """Collects the controls that no label encloses."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.bare: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = self.inside or tag == "label"
        if tag in ("input", "select") and not self.inside:
            self.bare.append(str(dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "label"


def test_every_id_is_there_once_and_every_used_one_exists() -> None:
    ids = Outline().ids
    assert len(ids) == len(set(ids))
    used = {match for name in SCRIPTS for match in re.findall(r'byId\("([\w-]+)"\)', text(name))}
    referred = {
        reference
        for _, name, value in Outline().attributes
        if name in ("for", "aria-labelledby", "aria-describedby")
        for reference in value.split()
    }
    anchors = {value[1:] for _, name, value in Outline().attributes if name == "href" and value.startswith("#")}
    assert used
    assert (used | referred | anchors) - set(ids) == set()


def test_every_control_has_a_name() -> None:
    labels = Labels()
    labels.feed(text("index.html"))
    assert labels.bare == []


def test_works_under_a_strict_content_security_policy() -> None:
    """``default-src 'self'``: no inline script, handler or style, and no markup made of data."""
    assert not [item for item in Outline().attributes if item[1].startswith("on") or item[1] == "style"]
    assert "<style" not in text("index.html")
    assert not re.search(r"<script(?![^>]*\bsrc=)", text("index.html"))
    for name in SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text(name)
        ), name
        assert 'setAttribute("style"' not in text(name)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    without_namespace = text(name).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"(https?:)?//[\w-]+\.\w", without_namespace)


def test_every_file_is_used_and_every_used_file_exists() -> None:
    loaded = {
        value.removeprefix("page/")
        for tag, name, value in Outline().attributes
        if name == "src" or (tag == "link" and name == "href")
    }
    imported = {match for name in SCRIPTS for match in re.findall(r'from "\./([\w.]+)"', text(name))}
    assert loaded | imported | {"index.html"} == set(NAMES)


def test_every_import_is_exported() -> None:
    for name in SCRIPTS:
        for names, source in re.findall(r'import \{ ([^}]+) \} from "\./([\w.]+)"', text(name)):
            exported = set(re.findall(r"export (?:const|class|(?:async )?function) (\w+)", text(source)))
            assert {part.strip() for part in names.split(",")} <= exported, (name, source)
