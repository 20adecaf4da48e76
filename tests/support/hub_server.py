"""A small Hugging Face hub on this machine, and a cache as huggingface_hub lays it out."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40


def cached(
    root: Path, repository: str, source: Path, *, commit: str = COMMIT, refs: tuple[str, ...] = ("main",)
) -> Path:
    """The snapshot of `repository` in the cache `root`, its files linked to blobs with the content of `source`."""
    folder = root / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file in source.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        (folder / "blobs" / blob).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    for ref in refs:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


class HubServer:
    """What it serves, and the paths of the files that were asked for."""

    def __init__(self, repository: str, files: Mapping[str, bytes]) -> None:
        self.repository, self.files = repository, files
        self.fetched: set[str] = set()
        self.endpoint = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request of `path`."""
        api, files = f"/api/models/{self.repository}", f"/{self.repository}/resolve/{COMMIT}/"
        if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}", api):
            return self._json({"id": self.repository, "sha": COMMIT, "siblings": []})
        if path.startswith(f"{api}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith(f"{api}/tree/{COMMIT}"):
            return self._json([self._entry(name, content) for name, content in self.files.items()])
        if path.startswith("/api/models/gated/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = path.removeprefix(files)
        if path.startswith(files) and name in self.files:
            self.fetched.add(name)
            content = self.files[name]
            return 200, {"ETag": f'"{self._oid(content)}"', "X-Repo-Commit": COMMIT}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": self._oid(content)}

    def _oid(self, content: bytes) -> str:
        return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serving(repository: str, files: Mapping[str, bytes]) -> Iterator[HubServer]:
    """Serve `files` as the branch main of `repository` on 127.0.0.1."""
    hub = HubServer(repository, files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(urlsplit(self.path).path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the default writes to stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
