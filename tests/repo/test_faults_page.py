"""The page of faults names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.helpers.repository import files, syntax, text

PAGE = "docs/faults.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(text(PAGE))
    missing = [
        f"{name}::{test}" for name, test in named if name not in files() or test not in functions_of(syntax(name))
    ]
    assert len(named) > 40
    assert not missing


def test_every_row_has_a_test_or_says_that_it_is_open() -> None:
    rows = [line for line in text(PAGE).splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    bare = [row for row in rows if not row.startswith("| ---") and not NAMED.search(row) and "*Open*" not in row]
    assert not bare


def functions_of(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
