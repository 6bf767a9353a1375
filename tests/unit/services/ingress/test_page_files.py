from __future__ import annotations

from pathlib import Path

from services.ingress.page_files import load_page


def test_the_page_is_served_from_its_folder_and_nothing_else(tmp_path: Path) -> None:
    for name in ("index.html", "main.js", "style.css", "icon.svg", "notes.txt", "secret.py"):
        (tmp_path / name).write_text(name)

    files = load_page(tmp_path)

    assert set(files) == {"/", "/page/main.js", "/page/style.css", "/page/icon.svg"}
    assert files["/"].content == b"index.html"
    assert files["/page/main.js"].media_type.startswith("text/javascript")


def test_a_deployment_without_a_page_serves_none(tmp_path: Path) -> None:
    assert load_page(tmp_path / "absent") == {}
