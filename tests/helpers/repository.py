"""What the repository tests look at: the files that git knows or would add, and the syntax trees of ours."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "services", "models", "training", "cluster", "kernels", "benchmarks")


@functools.cache
def files() -> tuple[str, ...]:
    """Return the paths, relative to the root, of all files that are tracked or would be (not ignored)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return tuple(sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file()))


def python_files(*folders: str) -> list[str]:
    """Return the Python files under ``folders`` (all of the repository without any)."""
    return [
        name
        for name in files()
        if name.endswith(".py") and (not folders or any(name.startswith(f"{folder}/") for folder in folders))
    ]


@functools.cache
def text(name: str) -> str:
    """Return the text of a file, "" for a binary one."""
    raw = (ROOT / name).read_bytes()
    return "" if b"\0" in raw else raw.decode("utf-8")


@functools.cache
def syntax(name: str) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return ast.parse(text(name), filename=name)


def module_of(name: str) -> str:
    """Return the dotted module of a Python file."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """Return every node of a Python file's syntax tree; walked once for all that ask."""
    return tuple(ast.walk(syntax(name)))


@functools.cache
def names_used_in(name: str) -> list[tuple[int, str]]:
    """Return what ``names_used`` finds in a Python file."""
    return names_used(nodes(name))


def names_used(tree: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Return (line, dotted origin) of every name imported from a module and every attribute path used in a file,
    of which ``tree`` is every node.

    ``from time import sleep as s; s(1)`` and ``import time as t; t.sleep(1)`` both give ``time.sleep``.
    """
    origin: dict[str, str] = {}
    used: list[tuple[int, str]] = []
    attributes: list[ast.Attribute] = []
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                origin[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                origin[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.append((node.lineno, f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Attribute):
            attributes.append(node)
    for attribute in attributes:
        path = _dotted(attribute)
        if path is not None and path[0] in origin:
            used.append((attribute.lineno, ".".join([origin[path[0]], *path[1:]])))
    return used


def _dotted(node: ast.expr) -> list[str] | None:
    """Return ["a", "b", "c"] for the expression ``a.b.c``, None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else None
