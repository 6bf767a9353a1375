"""Sizes, names and texts of the repository's own files."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable

import pytest

from tests.helpers.repository import PACKAGES, ROOT, files, module_of, nodes, python_files, syntax, text

LINES_MAX = 600
KERNEL_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
FILE_BYTES_MAX = 1 << 20
# Suppressions of a checker. The number only falls: whoever removes some lowers it.
SUPPRESSIONS_MAX = 25

CODE_SUFFIXES = (".py", ".sh", ".js", ".css", ".html", ".cpp", ".h")
DATA_SUFFIXES = (
    ".csv",
    ".gz",
    ".npz",
    ".npy",
    ".pt",
    ".safetensors",
    ".parquet",
    ".arrow",
    ".whl",
    ".zip",
    ".dat",
    ".rdb",
)
# Paths that exist on one machine only; <user> folders, temporary folders of a person, mounts.
MACHINE_PATH = re.compile(r"(?<![\w.<>$}/])/(?:work|home|Users|root|mnt|opt)/[\w.-]+")


def functions(tree: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short() -> None:
    long = []
    for name in files():
        if name.endswith(CODE_SUFFIXES):
            limit = KERNEL_LINES_MAX if name.startswith("kernels/") else LINES_MAX
            num_lines = text(name).count("\n")
            if num_lines > limit:
                long.append(f"{name}: {num_lines} lines, at most {limit}")
    assert not long


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines, under {FUNCTION_LINES_MAX}"
        for name in python_files()
        for node in functions(nodes(name))
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_names_say_something() -> None:
    vague_files = [n for n in python_files() if re.search(r"(^|/)(utils?|common|misc|managers?)\.py$", n)]
    vague_classes = [
        f"{name}:{node.lineno} {node.name}"
        for name in python_files(*PACKAGES)
        for node in nodes(name)
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Utils?)$", node.name)
    ]
    assert not vague_files + vague_classes


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {name.rpartition("/")[0] for name in python_files(*PACKAGES)}
    parents = {"/".join(folder.split("/")[: i + 1]) for folder in folders for i in range(folder.count("/") + 1)}
    missing = [folder for folder in sorted(parents) if f"{folder}/__init__.py" not in files()]
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_ship_their_types(package: str) -> None:
    assert f"{package}/py.typed" in files()


def test_every_public_module_has_a_docstring() -> None:
    missing = [module_of(name) for name in python_files(*PACKAGES) if not ast.get_docstring(syntax(name))]
    assert not missing


def test_print_only_where_a_person_reads() -> None:
    """The command line and the benchmarks print; everything else logs."""
    found = [
        f"{name}:{node.lineno}"
        for name in python_files(*PACKAGES)
        if not name.startswith(("cluster/cli", "benchmarks/"))
        for node in nodes(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found


def test_suppressions_carry_codes_and_are_few() -> None:
    suppressions = re.compile(
        r"#\s*(type:\s*ignore|noqa|mypy:|pyright:|ruff:\s*noqa|pragma:\s*no cover)(?P<rest>[^#]*)"
    )
    bare, num_found = [], 0
    for name in python_files():
        for number, line in enumerate(text(name).splitlines(), 1):
            match = suppressions.search(line)
            if match is None or name == "tests/repo/test_tidiness.py":
                continue
            num_found += 1
            if not re.match(r"\s*(\[[\w-]+(,\s*[\w-]+)*\]|:\s*[A-Z]+[0-9]+)", match["rest"]):
                bare.append(f"{name}:{number} {line.strip()}")
    assert not bare, "name the code that is suppressed"
    assert num_found <= SUPPRESSIONS_MAX


def test_nothing_that_a_run_makes_and_no_data_is_tracked() -> None:
    folders = ("var/", ".venv/", "build/", "dist/")
    made = [n for n in files() if n.startswith(folders) or n.endswith(DATA_SUFFIXES) or "__pycache__" in n]
    large = [n for n in files() if (ROOT / n).stat().st_size > FILE_BYTES_MAX]
    assert not made + large


def test_no_path_of_one_machine() -> None:
    found = [
        f"{name}:{number} {match.group()}"
        for name in files()
        for number, line in enumerate(text(name).splitlines(), 1)
        for match in [MACHINE_PATH.search(line)]
        if match
    ]
    assert not found


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    found = [
        f"{name}:{number} {line.strip()}"
        for name in python_files(*PACKAGES)
        for number, line in enumerate(text(name).splitlines(), 1)
        if words.search(line)
    ]
    assert not found


def test_text_files_are_clean() -> None:
    dirty = []
    for name in files():
        content = text(name)
        if content and (not content.endswith("\n") or "\r" in content or re.search(r"[ \t]+$", content, re.MULTILINE)):
            dirty.append(name)
    assert not dirty, "end of line: LF, no blanks before it, one at the end of the file"


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    changelog = text("CHANGELOG.md")
    assert "## [Unreleased]" in changelog
    assert re.search(rf"\b{re.escape(version)}\b", changelog), f"CHANGELOG.md does not mention {version}"
