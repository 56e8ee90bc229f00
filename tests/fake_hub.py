"""A server with the few addresses of the Hugging Face hub that a download asks for."""

import contextlib
import hashlib
import http.server
import json
import urllib.parse

from object_store import listening

SHA = "1234567890" * 4


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        is_api = path.startswith("/api")
        found = path.removeprefix("/api")
        for kind in ("/datasets/", "/models/", "/"):
            found = found.removeprefix(f"{kind}{hub.repo}")
        rest = found.split("/")[1:]
        if hub.status or found == path.removeprefix("/api"):
            codes = {403: "GatedRepo", 401: "GatedRepo", 0: "RepoNotFound"}
            headers = {"X-Error-Code": codes[hub.status]} if hub.status in codes else {}
            return self._send(hub.status or 404, b"{}", headers)
        if rest[:1] == ["revision"] and rest[1] not in ("main", SHA):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api:
            sizes = [(name, len(content)) for name, content in hub.files.items()]
            value = {"id": hub.repo, "sha": SHA}
            value["siblings"] = [{"rfilename": name, "size": size} for name, size in sizes]
            if rest[:1] == ["tree"]:
                file = {"type": "file", "oid": SHA}
                value = [file | {"path": name, "size": size} for name, size in sizes]
            headers = {"Content-Type": "application/json"}
            return self._send(200, json.dumps(value).encode(), headers)
        content = hub.files["/".join(rest[2:])]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}
        self._send(200, content, headers, cut=hub.cut)

    do_HEAD = do_GET

    def _send(self, status, content, headers, cut=0) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) - cut])

    def log_message(self, *_) -> None:
        pass


class Hub:
    """A data set or a model `repo` of `files`. `status`: what every request gets; `cut`: bytes that
    downloads lack; `asked`: the requests."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.status = self.cut = 0
        self.asked: list[tuple[str, str]] = []


def serve(hub: Hub) -> contextlib.AbstractContextManager[str]:
    """The address of a server of `hub`."""
    return listening(_Handler, hub=hub)
