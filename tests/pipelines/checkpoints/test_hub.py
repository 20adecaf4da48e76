"""Names of checkpoints: an existing path is used first, then the cache, then a download. Failures are one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint, open_target
from dspark_jax.pipelines.checkpoints.hub import HubName, cache_root, local_path
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.hub_server import COMMIT, OTHER_COMMIT, HubServer, cached, serving

ENVIRONMENT = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "TRANSFORMERS_OFFLINE")
ROOT = Path(__file__).parents[3]
HAS_HUB = importlib.util.find_spec("huggingface_hub") is not None


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in a separate home directory. No test here may use the network."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".cache" / "huggingface" / "hub"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The smallest set of files that is a checkpoint."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def refusal(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        local_path(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what a name can be ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", HubName(org="Qwen", name="Qwen3-8B")),
        ("a/b_c.d", HubName(org="a", name="b_c.d")),
        ("org/name@v1.0", HubName(org="org", name="name", revision="v1.0")),
        ("org/name@refs/pr/3", HubName(org="org", name="name", revision="refs/pr/3")),
    ],
)
def test_ids_are_two_words_and_perhaps_a_revision(text: str, expected: HubName) -> None:
    assert HubName.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "a/b/c", "./a/b", "../a", "/a/b", "~/a", "a/", "/b", "a/b.gguf", "a/b.safetensors", "org/a--b"),
        *("org/..", "org/na..me", "org/name@", "org/name@..", "org/name@../x", "org/name@/x", "org/name@a b", "a b/c"),
        *("org/näme", "-a/b", "a\\b", "org/name@v1@v2"),
    ],
)
def test_everything_else_can_only_be_a_path(text: str) -> None:
    assert HubName.parse(text) is None


@pytest.mark.parametrize(
    "host", ["https://huggingface.co", "http://www.HuggingFace.co", "https://hf.co", "https:/hf.co"]
)
@pytest.mark.parametrize(
    ("page", "expected"),
    [
        *(
            (page, "org/na.me")
            for page in ("org/na.me", "org/na.me/", "org/na.me?library=x#use", "org/na.me/tree/main")
        ),
        ("org/na.me/tree/v1.0", "org/na.me@v1.0"),
        ("org/na.me/tree/refs%2Fpr%2F3", "org/na.me@refs/pr/3"),
    ],
)
def test_the_url_of_a_models_page_is_its_id(cache: Path, files: Path, host: str, page: str, expected: str) -> None:
    assert str(HubName.parse(f"{host}/{page}")) == expected
    snapshot = cached(cache, "org/na.me", files, refs=("main", "v1.0", "refs/pr/3"))
    assert local_path(f"{host}/{page}") == snapshot
    assert local_path(Path(f"{host}/{page}")) == snapshot


@pytest.mark.parametrize(
    "url",
    [
        *("https://huggingface.co", "https://huggingface.co/org", "https://huggingface.co/datasets/org/name"),
        *("https://huggingface.co/datasets/name", "https://huggingface.co/org/name/blob/main/config.json"),
        *("https://huggingface.co/org/name/tree/main/sub", "https://huggingface.co/org/../name", "s3://bucket/name"),
        *("https://example.com/org/name", "https://example.com/huggingface.co/org/name", "file:///tmp/name"),
    ],
)
def test_any_other_url_is_refused_with_what_is_wanted(url: str) -> None:
    allowed = "allowed a directory, or a Hugging Face id (ORG/NAME or ORG/NAME@REVISION)"
    assert refusal(url) == f"{url!r}: found a URL, {allowed}"


def test_a_name_that_no_file_can_have_is_one_short_line(tmp_path: Path) -> None:
    assert refusal("x" * 5000).endswith("(5002 characters): cannot be looked up: File name too long")
    assert refusal("two\nlines") == "'two\\nlines': no such file or directory"
    assert "x\\x00y" in refusal("x\0y")
    odd = tmp_path / "two\nlines"
    odd.mkdir()
    assert local_path(odd) == odd


def test_a_directory_wins_over_an_id(tmp_path: Path, cache: Path, files: Path) -> None:
    cached(cache, "org/name", files)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_path("org/name") == Path("org/name")
    assert local_path(Path("org/name")) == Path("org/name")


def test_a_tilde_is_the_home_directory(tmp_path: Path, files: Path) -> None:
    assert local_path("~/files") == files
    assert local_path("~/nothing/here.gguf") == tmp_path / "nothing" / "here.gguf"
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")
    with pytest.raises(CheckpointError, match=r"nothing: no such directory"):
        open_checkpoint("~/nothing")


# --- the cache ---


def test_an_id_in_the_cache_is_its_snapshot_without_huggingface_hub(
    cache: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    snapshot = cached(cache, "org/name", files)
    assert local_path("org/name") == snapshot
    assert (snapshot / "config.json").read_text() == "{}"


def test_revisions_are_branches_tags_and_commits(cache: Path, files: Path) -> None:
    snapshot = cached(cache, "org/name", files)
    other = cached(cache, "org/name", files, commit=OTHER_COMMIT, refs=("v2", "refs/pr/3"))
    assert local_path("org/name") == local_path("org/name@main") == local_path(f"org/name@{COMMIT}") == snapshot
    assert local_path("org/name@v2") == local_path("org/name@refs/pr/3") == other
    assert local_path(f"org/name@{OTHER_COMMIT}") == other
    assert "org/name@v3: no such directory, and as a Hugging Face id not in the cache" in refusal("org/name@v3")


@pytest.mark.parametrize(
    ("variables", "root"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "~/home", "XDG_CACHE_HOME": "/x"}, "~/home/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"}, "/old"),
        ({"HF_HUB_CACHE": "$HF_HOME/cache", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"}, "/home/cache"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], root: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(root).expanduser()
    if HAS_HUB:
        script = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(cache_root())


def test_a_folder_of_the_cache_stands_for_its_snapshot(cache: Path, files: Path) -> None:
    snapshot = cached(cache, "org/name", files)
    for path in (snapshot.parents[1], snapshot.parent, snapshot):
        assert local_path(path) == snapshot
        assert local_path(str(path)) == snapshot
    cached(cache, "org/name", files, commit=OTHER_COMMIT, refs=())
    assert local_path(snapshot.parents[1]) == snapshot  # main


def test_a_folder_without_main_must_have_one_snapshot(cache: Path, files: Path) -> None:
    snapshot = cached(cache, "org/name", files, refs=())
    folder = snapshot.parents[1]
    assert local_path(folder) == snapshot
    cached(cache, "org/name", files, commit=OTHER_COMMIT, refs=())
    assert refusal(str(folder)) == (
        f"{folder}: snapshots: found 2 ({COMMIT}, {OTHER_COMMIT}) and no refs/main, allowed one of them by its path"
    )


def test_a_directory_that_is_only_called_like_the_cache_is_itself(tmp_path: Path) -> None:
    (tmp_path / "models--mine").mkdir()
    assert local_path("models--mine") == Path("models--mine")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "model-2.safetensors"])
def test_a_snapshot_that_lacks_something_is_not_used(cache: Path, files: Path, missing: str) -> None:
    if missing == "model-2.safetensors":
        (files / "model.safetensors").rename(files / "model-1.safetensors")
        shards = {"a": "model-1.safetensors", "b": missing}
        (files / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    else:
        (files / missing).unlink()
    snapshot = cached(cache, "org/name", files)
    assert refusal("org/name") == (
        f"org/name: no such directory, and as a Hugging Face id {missing} is missing in the cache ({snapshot}); "
        "HF_HUB_OFFLINE forbids a download"
    )
    (snapshot / missing).write_bytes(b"")
    assert local_path("org/name") == snapshot


def test_a_link_out_of_the_cache_is_not_followed(cache: Path, files: Path) -> None:
    snapshot = cached(cache, "org/name", files)
    (snapshot.parents[1] / "refs" / "main").write_text("../../../files")
    assert "not in the cache" in refusal("org/name")


def test_what_is_opened_is_the_snapshot(cache: Path, data_dir: Path) -> None:
    snapshot = cached(cache, "org/target", data_dir / "D_loop" / "target")
    for opened in (open_target("org/target"), open_checkpoint(snapshot.parents[1])):
        assert opened.path == snapshot
        assert opened.tensors.keys() == open_checkpoint(data_dir / "D_loop" / "target").tensors.keys()


# --- no network, no package ---


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(variable, "yes")
    assert refusal("org/name") == (
        f"org/name: no such directory, and as a Hugging Face id not in the cache {cache}; HF_HUB_OFFLINE forbids a "
        "download"
    )


def test_without_huggingface_hub_the_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert refusal("org/name") == (
        f"org/name: no such directory, and as a Hugging Face id not in the cache {cache}; a download needs "
        "huggingface_hub: pip install huggingface_hub (or the extra: pip install 'dspark-jax[hub]', in a checkout pip "
        "install -e '.[hub]')"
    )


# --- downloads, from a hub on this machine ---

needs_hub = pytest.mark.skipif(not HAS_HUB, reason="needs huggingface_hub, the extra `hub`")
WANTED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
UNWANTED = ("pytorch_model.bin", "modeling.py", "README.md", "onnx/model.safetensors", "consolidated.safetensors")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving("org/name", dict.fromkeys((*WANTED, *UNWANTED), b"{}")) as server:
        yield server


def resolved(name: str, endpoint: str) -> subprocess.CompletedProcess[str]:
    """The result of `local_path`, or its error line, in a new process: the library reads its environment only once."""
    script = (
        "import sys\n"
        "from dspark_jax.pipelines.checkpoints.hub import local_path\n"
        "from dspark_jax.speculators_common.errors import CheckpointError\n"
        "try:\n    print(local_path(sys.argv[1]))\n"
        "except CheckpointError as error:\n    sys.exit(f'refused: {error}')\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "2"}
    return subprocess.run(
        [sys.executable, "-c", script, name], env=environment, cwd=ROOT, capture_output=True, text=True
    )


@needs_hub
def test_an_id_is_downloaded_once_and_only_what_is_read(hub: HubServer, cache: Path) -> None:
    first = resolved("org/name", hub.endpoint)
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert first.stdout.strip() == str(snapshot)
    assert "100%" in first.stderr  # the progress bar
    assert hub.fetched == set(WANTED) == {file.name for file in snapshot.iterdir()}
    hub.files = {}
    second = resolved("org/name", hub.endpoint)
    assert (second.stdout, second.stderr) == (first.stdout, "")


@needs_hub
def test_a_cut_off_download_is_completed(hub: HubServer, cache: Path, files: Path) -> None:
    (files / "model.safetensors").unlink()
    snapshot = cached(cache, "org/name", files)
    assert resolved("org/name", hub.endpoint).stdout.strip() == str(snapshot)
    assert "model.safetensors" in hub.fetched


@needs_hub
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name@v9", "the hub has no revision 'v9' of it"),
        ("org/other", "the hub has no such model, or a private one (HF_TOKEN)"),
        ("gated/name", "log in with `hf auth login` or HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: HubServer, cache: Path, name: str, expected: str) -> None:
    refused = resolved(name, hub.endpoint)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith(f"refused: {name}: no such directory, and as a Hugging Face id not in the cache {cache}; ")
    assert last.endswith(expected)


@needs_hub
def test_a_repository_without_safetensors_is_refused(hub: HubServer) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    refused = resolved("org/name", hub.endpoint)
    assert "refused: org/name: model.safetensors: missing in " in refused.stderr
    assert hub.fetched == {"config.json"}


@needs_hub
def test_without_a_network_that_is_said_in_one_line(cache: Path) -> None:
    refused = resolved("org/name", "http://127.0.0.1:9")
    assert refused.stderr.splitlines()[-1].startswith(
        f"refused: org/name: no such directory, and as a Hugging Face id not in the cache {cache}; it cannot be "
        "downloaded: "
    )
