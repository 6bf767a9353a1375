"""Nothing that comes from outside is read by a loader that can run code."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from tests.helpers.repository import PACKAGES, nodes, python_files

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""May not be imported at all: no part of the product reads or writes what they do."""

BUILTINS = {"eval", "exec", "compile", "__import__"}

LOADERS = {f"{how}load{what}" for how in ("", "unsafe_", "full_") for what in ("", "_all", "_state_dict_from_url")}
"""Last names of the calls that are looked at."""


def unsafe(tree: Iterable[ast.AST]) -> list[str]:
    """Return what a module, given as its nodes, does that could run code which it was given as data."""
    found = []
    for node in tree:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and (reason := _call(node)):
            found.append(reason)
    return found


def _call(node: ast.Call) -> str:
    last = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if last not in BUILTINS | LOADERS:
        return ""
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    name = ast.unparse(node.func)
    if name in BUILTINS:
        return name
    if name == "torch.load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if name.endswith((".load_state_dict_from_url", "hub.load")):
        return name
    if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        return "numpy.load with pickles"
    if name in ("yaml.load", "yaml.load_all"):
        loader = given.get("Loader") or (ast.unparse(node.args[1]) if len(node.args) > 1 else "")
        return "" if loader in ("yaml.SafeLoader", "yaml.CSafeLoader", "_Loader") else f"{name} with {loader or 'any'}"
    return name if name in ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all") else ""


def test_no_loader_can_run_code() -> None:
    found = [f"{name}: {what}" for name in python_files(*PACKAGES) for what in unsafe(nodes(name))]
    assert not found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "import cloudpickle as cp", "torch.load(path)", "eval(text)",
     "torch.load(path, weights_only=False)", "np.load(p, allow_pickle=True)", "yaml.load(text, yaml.Loader)",
     "yaml.unsafe_load(text)", "yaml.load(text)", "exec(text)", "from joblib import load"],
)  # fmt: skip
def test_what_is_unsafe_is_found(source: str) -> None:
    assert len(unsafe(ast.walk(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["network.eval()", "torch.load(p, weights_only=True)", "np.load(p)", "yaml.safe_load(t)", "import json",
     "yaml.load(t, Loader=yaml.SafeLoader)", "re.compile(p)"],
)  # fmt: skip
def test_what_is_safe_is_not(source: str) -> None:
    assert unsafe(ast.walk(ast.parse(source))) == []
