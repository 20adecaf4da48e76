"""Architectures by name: built in, registered by hand, or added by another distribution."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_jax import architectures
from dspark_jax.architectures import registry
from dspark_jax.architectures.registry import (
    SupportedArchitecture,
    built_in,
    known_names,
    own_config_files,
    register,
    retrieve,
)
from dspark_jax.speculators_common.errors import CheckpointError, DSparkError

BUILT_IN = {
    "LlamaForCausalLM": ("target", "llama"),
    "Qwen3ForCausalLM": ("target", "qwen3"),
    "DSparkDraftModel": ("draft", "speculators_dspark"),
    "DSparkSpeculator": ("draft", "speculators_dspark"),
    "Qwen3DSparkModel": ("draft", "deepspec_qwen3"),
}


@pytest.fixture(autouse=True)
def own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that a test registers are removed after it."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def _entry(name: str, **changes: Any) -> SupportedArchitecture:
    return dataclasses.replace(retrieve("Qwen3ForCausalLM"), name=name, **changes)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_architectures_are_found(name: str) -> None:
    entry = retrieve(name)
    assert (entry.kind, entry.family) == BUILT_IN[name]
    assert retrieve(name) is entry
    assert name in known_names()


def test_an_alias_is_the_same_entry() -> None:
    assert retrieve("DSparkSpeculator").build == retrieve("DSparkDraftModel").build
    entry = register(_entry("OneForCausalLM", aliases=("OtherForCausalLM",)))
    assert retrieve("OneForCausalLM") is retrieve("OtherForCausalLM") is entry


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(CheckpointError) as caught:
        retrieve("Qwen3ForCausalLm")
    message = str(caught.value)
    assert "unknown architecture 'Qwen3ForCausalLm' (did you mean Qwen3ForCausalLM?)" in message
    assert all(name in message for name in BUILT_IN)
    assert "\n" not in message


def test_a_name_unlike_all_others_gets_no_guess() -> None:
    with pytest.raises(CheckpointError) as caught:
        retrieve("zzz")
    assert "did you mean" not in str(caught.value)
    assert "LlamaForCausalLM" in str(caught.value)


@pytest.mark.parametrize("taken", ["LlamaForCausalLM", "DSparkSpeculator"])
def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(taken: str) -> None:
    """Built-in names that were not imported yet, and aliases, count as taken."""
    before = retrieve(taken)
    for entry in (_entry(taken), _entry("NewForCausalLM", aliases=(taken,))):
        with pytest.raises(DSparkError, match=f"'{taken}' is registered already.*override=True"):
            register(entry)
        assert retrieve(taken) is before
    assert "NewForCausalLM" not in known_names()
    mine = register(_entry(taken), override=True)
    assert retrieve(taken) is mine


def test_every_folder_that_declares_a_family_is_found_and_nothing_else_is() -> None:
    root = Path(registry.__file__).parent
    declared = {
        name
        for folder in root.iterdir()
        if (folder / "arch.py").is_file()
        for entry in importlib.import_module(f"dspark_jax.architectures.{folder.name}.arch").ARCHITECTURES
        for name in entry.names
    }
    assert set(BUILT_IN) <= declared == set(built_in())
    assert {"Gemma4DSparkModel", "DFlashSpeculator", "Gemma4UnifiedForConditionalGeneration"} <= declared


@pytest.fixture
def new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The package with one folder more. Names are found anew before and after the test."""
    folder = tmp_path / "dspark_jax_more"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "arch.py").write_text(
        "import dataclasses\n"
        "from dspark_jax.architectures.llama.arch import ARCHITECTURES as LLAMA\n"
        "ARCHITECTURES = tuple(dataclasses.replace(entry, name=f'More{entry.name}') for entry in LLAMA)\n"
    )
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    built_in.cache_clear()
    yield "MoreLlamaForCausalLM"
    built_in.cache_clear()
    sys.modules.pop("dspark_jax.architectures.dspark_jax_more.arch", None)
    sys.modules.pop("dspark_jax.architectures.dspark_jax_more", None)


def test_a_new_folder_is_a_new_family(new_family: str) -> None:
    assert new_family in known_names()
    assert retrieve(new_family).family == "llama"


def test_two_folders_cannot_declare_one_name(new_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = importlib.import_module("dspark_jax.architectures.dspark_jax_more.arch")
    monkeypatch.setattr(more, "ARCHITECTURES", (_entry("LlamaForCausalLM", family="more"),))
    built_in.cache_clear()
    with pytest.raises(DSparkError, match=r"'LlamaForCausalLM': declared by more and by llama|by llama and by more"):
        known_names()


def test_help_imports_no_model() -> None:
    """Only commands that load a model import the families, because that also imports JAX and Flax."""
    code = (
        "import sys\nfrom dspark_jax.pipelines.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name.split('.')[0] in ('jax', 'flax') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


class TestOtherDistributions:
    """A distribution with entry points in the group `dspark_jax.architectures`, on `sys.path` like an installed one."""

    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        metadata = tmp_path / "acme_models-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(
            "[dspark_jax.architectures]\n"
            "AcmeForCausalLM = acme_models:ARCHITECTURE\n"
            "AcmeWrongForCausalLM = acme_models:NAME\n"
            "AcmeGoneForCausalLM = acme_models_gone:ARCHITECTURE\n"
        )
        (tmp_path / "acme_models.py").write_text(
            "import dataclasses\n"
            "from dspark_jax.architectures.registry import retrieve\n"
            "NAME = 'AcmeForCausalLM'\n"
            "ARCHITECTURE = dataclasses.replace(retrieve('LlamaForCausalLM'), name=NAME, family='acme')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme_models", raising=False)
        return tmp_path

    def test_its_architecture_is_known_and_imported_on_first_use(self, site: Path) -> None:
        assert "AcmeForCausalLM" in known_names()
        assert "acme_models" not in sys.modules
        entry = retrieve("AcmeForCausalLM")
        assert (entry.kind, entry.family) == ("target", "acme")
        assert retrieve("AcmeForCausalLM") is entry

    def test_its_own_config_file_is_looked_for_only_where_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Opening a directory with a `config.json` imports no other package."""
        metadata = tmp_path / "acme_drafts-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-drafts\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[dspark_jax.architectures]\nAcmeDraft = acme_drafts:DRAFT\n")
        (tmp_path / "acme_drafts.py").write_text(
            "import dataclasses\n"
            "from dspark_jax.architectures.registry import retrieve\n"
            "DRAFT = dataclasses.replace(retrieve('DsparkDrafter'), name='AcmeDraft', config_file='acme.json')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme_drafts", raising=False)
        assert dict(own_config_files()) == {"dspark.json": "DsparkDrafter"}
        assert "acme_drafts" not in sys.modules
        found = {"dspark.json": "DsparkDrafter", "acme.json": "AcmeDraft"}
        assert dict(own_config_files(of_others=True)) == found
        assert dict(own_config_files()) == found, "an entry that was used counts from then on"

    def test_it_is_gone_with_the_distribution(self) -> None:
        assert "AcmeForCausalLM" not in known_names()

    def test_a_near_miss_names_it(self, site: Path) -> None:
        with pytest.raises(CheckpointError, match=r"did you mean AcmeForCausalLM\?"):
            retrieve("AcmeForCausalM")

    def test_a_registered_entry_comes_first(self, site: Path) -> None:
        with pytest.raises(DSparkError, match="AcmeForCausalLM"):
            register(_entry("AcmeForCausalLM"))
        mine = register(_entry("AcmeForCausalLM"), override=True)
        assert retrieve("AcmeForCausalLM") is mine

    def test_an_entry_point_of_the_wrong_kind_is_refused(self, site: Path) -> None:
        with pytest.raises(
            DSparkError, match=r"AcmeWrongForCausalLM.*acme_models:NAME.*found str, allowed SupportedArchitecture"
        ):
            retrieve("AcmeWrongForCausalLM")

    def test_an_entry_point_that_cannot_be_imported_is_named_with_the_cause(self, site: Path) -> None:
        with pytest.raises(DSparkError, match=r"AcmeGoneForCausalLM.*acme_models_gone:ARCHITECTURE.*No module named"):
            retrieve("AcmeGoneForCausalLM")
