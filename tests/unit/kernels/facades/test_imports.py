"""Importing an operator imports no Triton: kernel modules are reached from inside functions only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[4] / "kernels"
OPERATORS = sorted(path.parent.name for path in KERNELS.glob("*/triton_kernel.py"))
# What only kernel modules, the compiler and the GPU check import.
BEHIND = ("triton", "kernels.gpu.attention", "kernels.gpu.lang", "kernels.aot.compile")


def _imported_at_load(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is itself imported."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def _is_behind(module: str) -> bool:
    return module.endswith(".triton_kernel") or any(module == name or module.startswith(f"{name}.") for name in BEHIND)


def test_there_are_operators() -> None:
    assert len(OPERATORS) >= 7


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_facade_reaches_its_kernel_only_from_inside_a_function(operator: str) -> None:
    for path in (KERNELS / operator).glob("*.py"):
        if path.name != "triton_kernel.py":
            assert [module for module in _imported_at_load(path) if _is_behind(module)] == [], path


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.name)
def test_shared_modules_import_no_triton(path: Path) -> None:
    assert [module for module in _imported_at_load(path) if _is_behind(module)] == []


def test_the_rule_finds_an_import(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nif torch:\n    from kernels.fm_block import triton_kernel\n")
    assert [module for module in _imported_at_load(broken) if _is_behind(module)] == ["kernels.fm_block.triton_kernel"]
    broken.write_text("def later():\n    import triton\n")
    assert [module for module in _imported_at_load(broken) if _is_behind(module)] == []
