"""Contracts between modules that import-linter does not bring: kernel files import nothing of the project."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def _matching(modules: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [module for module in modules if any(fnmatchcase(module, pattern) for pattern in patterns)]


class KernelsAlone(Contract):
    """Modules of these names import nothing of the project but one another: a kernel can be read, and lifted out, alone."""

    modules = fields.SetField(subfield=fields.StringField())
    host_modules = fields.SetField(subfield=fields.StringField(), required=False, default=set())
    """Modules among them that launch kernels in CUDA C++, and are not kernel files themselves."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        patterns = sorted(cast("set[str]", self.modules))
        hosts = cast("set[str]", self.host_modules)
        kernels = {module for module in _matching(graph.modules, patterns) if not any(_matching([module], hosts))}
        if not kernels:
            raise ValueError(f"no module matches {patterns}; the contract would check nothing")
        broken = sorted(
            (kernel, imported)
            for kernel in kernels
            for imported in graph.find_modules_directly_imported_by(kernel)
            if imported not in kernels
        )
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for kernel, imported in check.metadata["broken"]:
            output.print_error(f"{kernel} imports {imported}; kernel files import only other kernel files.", bold=False)
        output.new_line()
