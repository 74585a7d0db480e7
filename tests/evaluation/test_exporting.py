"""Code of the small model in an exported folder."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from ragen_pl.evaluation.exporting import CODE_MODULES, IMPORTED, PACKAGE

EXPORTED = (*(f"{PACKAGE}.{module}" for module in CODE_MODULES), *IMPORTED)


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_module_imports_only_exported_modules(name: str) -> None:
    source = Path(str(import_module(name).__file__)).read_text(encoding="utf-8")
    imported = {
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ragen_pl")
    }
    assert imported <= set(EXPORTED)
