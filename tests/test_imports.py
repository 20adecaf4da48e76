"""The rooms: imports run one way, families do not know each other, nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import import_graph

ROOT = Path(__file__).parents[1]
PACKAGE_ROOT = ROOT / "src" / import_graph.PACKAGE
STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
MAX_LINES = 400


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return import_graph.read_tree(PACKAGE_ROOT)


def test_the_walk_sees_every_room(sources: dict[str, str]) -> None:
    for room in import_graph.ROOMS:
        files = [path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]
        modules = [name for name in sources if name.startswith(f"dspark_jax.{room}")]
        assert files
        assert len(modules) == len(files)
    assert import_graph.all_imports(sources)


def test_imports_are_absolute(sources: dict[str, str]) -> None:
    assert import_graph.relative_imports(sources) == []


def test_no_room_is_imported_by_its_bare_name(sources: dict[str, str]) -> None:
    assert import_graph.bare_room_imports(sources) == []


def test_no_room_imports_upwards(sources: dict[str, str]) -> None:
    assert import_graph.upward_imports(sources) == []


def test_no_model_family_is_imported_sideways(sources: dict[str, str]) -> None:
    assert import_graph.sideways_imports(sources) == []


def test_no_two_files_import_each_other(sources: dict[str, str]) -> None:
    assert import_graph.cycle(sources) == []


def test_rooms_use_only_their_packages_and_extras_only_inside_functions(sources: dict[str, str]) -> None:
    assert import_graph.foreign_imports(sources, STANDARD_LIBRARY) == []


@pytest.mark.parametrize(
    ("rule", "importer", "statement"),
    [
        (import_graph.relative_imports, "architectures.llama.model", "from . import config"),
        (import_graph.relative_imports, "architectures.llama.model", "def f():\n    from ..nn import norms"),
        (import_graph.bare_room_imports, "pipelines.generate", "import architectures.registry"),
        (import_graph.bare_room_imports, "pipelines.generate", "def f():\n    from speculators_common import errors"),
        (import_graph.upward_imports, "speculators_common.errors", "from dspark_jax.architectures import registry"),
        (import_graph.upward_imports, "speculators_common.errors", "import dspark_jax.pipelines"),
        (
            import_graph.upward_imports,
            "architectures.registry",
            "def f():\n    from dspark_jax.pipelines.generate import run",
        ),
        (import_graph.upward_imports, "pipelines.generate", "from dspark_jax import load"),
        (import_graph.upward_imports, "architectures.registry", "from dspark_jax import __version__"),
        (import_graph.upward_imports, "pipelines.bench.machine", "from dspark_jax import __version__"),
        (import_graph.upward_imports, "pipelines.commands.info", "def f():\n    import dspark_jax"),
        (import_graph.upward_imports, "architectures.registry", "from dspark_jax import architectures"),
        (
            import_graph.sideways_imports,
            "architectures.llama.model",
            "from dspark_jax.architectures.qwen3.model import Qwen3",
        ),
        (import_graph.sideways_imports, "architectures.llama.model", "from dspark_jax.architectures import qwen3"),
        (
            import_graph.sideways_imports,
            "architectures.nn.norms",
            "class A:\n    def f(self):\n        import dspark_jax.architectures.qwen3.model",
        ),
    ],
)
def test_each_rule_finds_a_planted_violation(rule, importer: str, statement: str) -> None:
    tree = {
        "dspark_jax.architectures.qwen3": "",
        "dspark_jax.architectures.qwen3.model": "",
        f"dspark_jax.{importer}": statement,
    }
    assert len(rule(tree)) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "import torch",
        "def f():\n    import torch.nn",
        "from transformers import AutoModel",
        "import gguf",
        "from matplotlib import pyplot",
        "if True:\n    import gguf",
    ],
)
def test_a_planted_foreign_import_is_found(statement: str) -> None:
    assert len(import_graph.foreign_imports({"dspark_jax.pipelines.generate": statement}, STANDARD_LIBRARY)) == 1


def test_text_packages_belong_to_the_pipelines_alone() -> None:
    tree = {f"dspark_jax.{room}.module": "import tokenizers" for room in import_graph.ROOMS}
    assert import_graph.foreign_imports(tree, STANDARD_LIBRARY) == [
        "dspark_jax.speculators_common.module:1: import tokenizers",
        "dspark_jax.architectures.module:1: import tokenizers",
    ]


def test_a_planted_cycle_is_found_through_a_function() -> None:
    tree = {
        "dspark_jax.pipelines.a": "from dspark_jax.pipelines import b",
        "dspark_jax.pipelines.b": "def f():\n    from dspark_jax.pipelines.c import g",
        "dspark_jax.pipelines.c": "import dspark_jax.pipelines.a",
    }
    assert set(import_graph.cycle(tree)) == set(tree)
    assert import_graph.cycle({**tree, "dspark_jax.pipelines.c": ""}) == []


def test_what_the_rules_allow_is_not_reported() -> None:
    tree = {
        "dspark_jax.speculators_common.errors": "import os\nimport jax.numpy as jnp",
        "dspark_jax.architectures.nn.norms": "from flax import nnx",
        "dspark_jax.architectures.llama.model": (
            "from dspark_jax.architectures.nn import norms\nfrom dspark_jax.speculators_common.errors import E"
        ),
        "dspark_jax.pipelines.generate": "from dspark_jax.architectures.llama import model",
        "dspark_jax.pipelines.checkpoints.checkpoint": "def f():\n    import gguf",
    }
    rules = (
        import_graph.relative_imports,
        import_graph.bare_room_imports,
        import_graph.upward_imports,
        import_graph.sideways_imports,
    )
    assert [fault for rule in (*rules, import_graph.cycle) for fault in rule(tree)] == []
    assert import_graph.foreign_imports(tree, STANDARD_LIBRARY) == []


def test_no_file_is_too_long_to_read_at_one_sitting() -> None:
    folders = [*import_graph.ROOMS, "src", "tests", "benchmarks", "examples"]
    files = {
        path.resolve()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize("room", import_graph.ROOMS)
def test_the_package_links_to_the_room(room: str) -> None:
    link = PACKAGE_ROOT / room
    assert link.is_symlink(), f"{link} is no symbolic link: clone with core.symlinks=true"
    assert link.readlink() == Path("..", "..", room)


def _modules_after(code: str) -> set[str]:
    """The names in `sys.modules` of a fresh interpreter that ran `code` in the repository root, where the bare room
    names can be imported.
    """
    probe = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stdout))


def test_importing_the_package_alone_is_light() -> None:
    rooms = [f"dspark_jax.{room}" for room in import_graph.ROOMS]
    modules = _modules_after("import dspark_jax")
    assert modules.isdisjoint({"jax", "numpy", "flax", "importlib.metadata", *rooms})
    modules = _modules_after("import dspark_jax\ndspark_jax.__version__")
    assert modules.isdisjoint({"jax", "numpy", "flax", *rooms[1:]}), "the version lies on the ground floor"


def test_importing_every_module_loads_no_bare_room_and_nothing_optional(sources: dict[str, str]) -> None:
    names = sorted(set(sources) - {"dspark_jax.__main__"})
    modules = _modules_after(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert set(names) <= modules
    assert modules.isdisjoint({*import_graph.ROOMS, *import_graph.EXTRAS, "torch", "transformers", "beartype"})
