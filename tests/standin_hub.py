"""A stand-in for the Hugging Face hub on the loopback: the three requests that huggingface_hub makes of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Repository:
    """Files by name. `branches` name commits; a new commit is a new set of files."""

    files: dict[str, bytes]
    gated: bool = False
    listed: list[str] = field(default_factory=list)  # names that the listing has besides

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


class StandinHub:
    """Repositories by id, at `url`; `asked` collects (method, path) of every request."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append((self.command, self.path))
                status, headers, body = hub.answer(self.path)
                if wanted := self.headers.get("Range"):
                    start = int(wanted.removeprefix("bytes=").split("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                    status, body = 206, body[start:]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(self, repo: str, folder: Path | None = None, **options: object) -> Repository:
        """A repository with the files of a folder."""
        names = sorted(folder.rglob("*")) if folder else []
        files = {str(path.relative_to(folder).as_posix()): path.read_bytes() for path in names if path.is_file()}
        self.repositories[repo] = Repository(files, **options)  # type: ignore[arg-type]
        return self.repositories[repo]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if repository.gated and not api:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in ("main", repository.commit):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Revision not found"}, b""
        if api and parts[2:3] == ["tree"]:  # what huggingface_hub 2 asks before it downloads
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repository.files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if api:
            siblings = [{"rfilename": name} for name in [*repository.files, *repository.listed]]
            info = {"id": "/".join(parts[:2]), "sha": repository.commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        content = repository.files.get("/".join(parts[4:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
        etag = hashlib.sha256(content).hexdigest()
        return (
            200,
            {"ETag": f'"{etag}"', "X-Repo-Commit": repository.commit, "X-Linked-Size": str(len(content))},
            content,
        )

    def downloaded(self) -> set[str]:
        """The names of the files whose content was sent."""
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path in self.asked
            if "/resolve/" in path and method == "GET"
        }

    def stop(self) -> None:
        """Closes the port: whoever asks now is refused."""
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def standin_hub() -> Iterator[StandinHub]:
    hub = StandinHub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        with contextlib.suppress(OSError):
            hub.stop()
        thread.join()


@contextlib.contextmanager
def broken_hub(*, resets: bool) -> Iterator[tuple[str, list[bytes]]]:
    """The url of a hub that accepts connections and never answers, or resets them, and the request of each."""
    requests: list[bytes] = []
    connections: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                requests.append(connection.recv(200).split(b"\r\n")[0])
                if resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    connection.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in connections:
            connection.close()
