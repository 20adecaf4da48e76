"""Finds the local path of a checkpoint from what a user writes: a directory, `~/...`, a folder of the Hugging Face
cache, or a Hugging Face id such as `Qwen/Qwen3-8B` or `org/name@revision`, also as the URL of its page.

An id is looked up in the local cache first, without huggingface_hub and without the network. If the cache lacks files,
huggingface_hub (the extra `hub`) downloads them: only safetensors, JSON and the chat template, nothing that could run
code.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import urllib.parse
from pathlib import Path

from dspark_jax.architectures.registry import CONFIG_FILE, own_config_files
from dspark_jax.speculators_common.errors import CheckpointError, RequestError, install_hint, shown

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"({_PART})/({_PART})", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)
# `Path` makes one slash of the two after the scheme.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}(?:www\.)?(?P<host>[^/]*)(?P<page>[^?#]*)", re.ASCII)
_HUB_HOSTS = frozenset({"huggingface.co", "hf.co"})
_PAGE = re.compile(r"/([^/]+/[^/]+)(?:/tree/([^/]+))?/?")
_NO_ORGS = frozenset({"api", "datasets", "docs", "spaces"})  # first words of pages that are not about a model
_ID = "a Hugging Face id (ORG/NAME or ORG/NAME@REVISION)"
_CACHE_FOLDER = re.compile(r"models--.+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FETCHED = ("*.safetensors", "*.json", "chat_template.jinja")
_NOT_FETCHED = ("*/*", "consolidated*.safetensors")  # other exports of the same weights
_NOT_AN_ID = frozenset({".gguf", ".safetensors", ".json"})
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubName:
    """A model on the Hugging Face hub. `str()` is what a user writes: `org/name`, or `org/name@revision`."""

    org: str
    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """The id in `text`, which may be the URL of its page; `None` if `text` can only be a path."""
        text = _without_host(text)
        repository, at, revision = text.partition("@")
        parts = _NAME.fullmatch(repository)
        if parts is None or ".." in text or "--" in repository or Path(repository).suffix in _NOT_AN_ID:
            return None
        if not at:
            return cls(org=parts[1], name=parts[2])
        return cls(org=parts[1], name=parts[2], revision=revision) if _REVISION.fullmatch(revision) else None

    @property
    def repository(self) -> str:
        """`org/name`."""
        return f"{self.org}/{self.name}"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


def check_name(value: object, argument: str, *, others: str = "") -> None:
    """Raise `RequestError` about `argument` unless `value` is text, or a path of text, that can name a checkpoint.

    `others` are further kinds of names that the message lists, for example `a .gguf file, `.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise RequestError(
            field=argument, found=value, allowed=f"the name of a checkpoint: a directory, {others}or {_ID}"
        )


def local_path(path_or_name: Path | str) -> Path:
    """The file or directory that `path_or_name` means. An existing path takes precedence over an id.

    A `models--org--name` folder of the cache means its snapshot of `main`, or its only snapshot. An id is downloaded if
    the cache lacks it. A path that does not exist and is no id is returned unchanged. Raises `CheckpointError` for an
    id that cannot be found or downloaded, with the reason, for a URL that is not the page of a model, and for a name
    that no file can have.
    """
    try:
        path = Path(path_or_name).expanduser()
    except RuntimeError:  # no such user
        return Path(path_or_name)
    if _exists(path):
        return _snapshot_of_folder(path) if path.is_dir() else path
    name = HubName.parse(str(path_or_name))
    if name is None and _URL.match(str(path_or_name)):
        raise CheckpointError(f"{shown(str(path_or_name))}: found a URL, allowed a directory, or {_ID}")
    return path if name is None else _of_hub(name)


def cache_root() -> Path:
    """The cache directory of huggingface_hub: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not stated:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        stated = os.path.join(os.environ.get("HF_HOME") or os.path.join(caches, "huggingface"), "hub")
    return Path(os.path.expandvars(os.path.expanduser(stated)))


def _exists(path: Path) -> bool:
    """Whether there is such a file or directory. Raises `CheckpointError` for a name that cannot be looked up, such as
    an overlong one, and for one whose control characters would break the line of a later error.
    """
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{shown(str(path))}: cannot be looked up: {reason}") from error
    if not exists and not str(path).isprintable():
        raise CheckpointError(f"{shown(str(path))}: no such file or directory")
    return exists


def _without_host(text: str) -> str:
    """`org/name` or `org/name@revision` for the URL of a model's page on the hub; other text unchanged."""
    url = _URL.fullmatch(text.split("?")[0].split("#")[0])
    page = None if url is None or url["host"].lower() not in _HUB_HOSTS else _PAGE.fullmatch(url["page"])
    if page is None or page[1].split("/")[0] in _NO_ORGS:
        return text
    return page[1] if page[2] is None else f"{page[1]}@{urllib.parse.unquote(page[2])}"


def _of_hub(name: HubName) -> Path:
    """The snapshot of `name`: the cached one if it has all files that loading needs, else a downloaded one."""
    root = cache_root()
    folder = root / f"models--{name.org}--{name.name}"
    cached = _cached_snapshot(folder, name.revision)
    missing = None if cached is None else _missing_file(cached)
    if cached is not None and missing is None:
        return cached
    absent = f"not in the cache {root}" if cached is None else f"{missing} is missing in the cache ({cached})"
    found = f"{name}: no such directory, and as a Hugging Face id {absent}"
    if _is_offline():
        raise CheckpointError(f"{found}; HF_HUB_OFFLINE forbids a download")
    downloaded = _downloaded(name, root, found)
    missing = _missing_file(downloaded)
    if missing is not None:
        raise CheckpointError(
            f"missing in {downloaded}; the repository holds none, or the hub could not be reached",
            file=str(name),
            field=missing,
        )
    return downloaded


def _downloaded(name: HubName, root: Path, found: str) -> Path:
    """Download the snapshot of `name`, with a progress bar on stderr. Error messages begin with `found`."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{found}; a download needs huggingface_hub: {install_hint('huggingface_hub', 'hub')}"
        ) from error
    try:
        return Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                cache_dir=root,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
                allow_patterns=list(_FETCHED),
                ignore_patterns=list(_NOT_FETCHED),
            )
        )
    except errors.GatedRepoError as error:
        reason = "the hub gives it to those only who accepted its terms there; log in with `hf auth login` or HF_TOKEN"
        raise CheckpointError(f"{found}; {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{found}; the hub has no revision {name.revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{found}; the hub has no such model, or a private one (HF_TOKEN)") from error
    except Exception as error:  # the library raises many types: no network, a full disk, a refusing server
        raise CheckpointError(f"{found}; it cannot be downloaded: {_first_line(error.__cause__ or error)}") from error


def _cached_snapshot(folder: Path, revision: str) -> Path | None:
    """The cached snapshot of a branch, a tag or a commit; `None` if there is none."""
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _snapshot_of_folder(path: Path) -> Path:
    """`path`, or its snapshot if `path` is the folder of one model in the cache."""
    folder = path.parent if path.name == "snapshots" else path
    if not _CACHE_FOLDER.fullmatch(folder.resolve().name) or not (folder / "snapshots").is_dir():
        return path
    main = _cached_snapshot(folder, "main")
    snapshots = sorted(entry for entry in (folder / "snapshots").iterdir() if entry.is_dir())
    if main is None and len(snapshots) != 1:
        listed = ", ".join(entry.name for entry in snapshots[:5]) or "none"
        raise CheckpointError(
            f"found {len(snapshots)} ({listed}) and no refs/main, allowed one of them by its path",
            file=folder,
            field="snapshots",
        )
    return main or snapshots[0]


def _missing_file(snapshot: Path) -> str | None:
    """A file that loading needs and the snapshot lacks, for example after an interrupted download; else `None`."""
    if not any((snapshot / config).is_file() for config in (CONFIG_FILE, *own_config_files())):
        return CONFIG_FILE
    index = snapshot / _INDEX
    if not index.is_file():
        return None if (snapshot / _SINGLE).is_file() else _SINGLE
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # opening the checkpoint reports the malformed index
    return next((str(shard) for shard in sorted(map(str, shards)) if not (snapshot / str(shard)).is_file()), None)


def _is_offline() -> bool:
    stated = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return stated.upper() in ("1", "ON", "YES", "TRUE")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
