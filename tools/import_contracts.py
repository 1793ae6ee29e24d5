"""Contract for import-linter: kernel files import only other kernel files of the project.

``pyproject.toml`` registers it as the contract type ``kernels_alone`` and lists the modules; ``make layers`` checks it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class KernelsAlone(Contract):
    """Contract that modules of given names import only one another, so that a kernel can be read and reused on its own."""

    modules = fields.SetField(subfield=fields.StringField())
    """Patterns of the kernel files' module names, as for ``fnmatch``."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        patterns = sorted(cast("set[str]", self.modules))
        kernels = {module for module in graph.modules if any(fnmatchcase(module, pattern) for pattern in patterns)}
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
