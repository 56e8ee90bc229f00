"""A server of objects in memory for tests: the parts of the protocols of S3 (path style) and of
Google Cloud Storage (JSON) that TensorStore speaks, with faults on demand."""

import contextlib
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any
from xml.sax.saxutils import escape

from ttcd_jax import storage

_GCS = "/storage/v1/b/"


class ObjectStore:
    """`objects`: {bucket/key: (generation, content)}. `fault(method, name)` is called at every
    request: a status to answer, seconds to wait, or None. `log` has (method, name, status)."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.fault: Callable[[str, str], int | float | None] = lambda method, name: None
        self.log: list[tuple[str, str, int]] = []
        self.lock, self.page, self.generation = threading.Lock(), 100, 0
        self.address = ""

    def environment(self) -> dict[str, str]:
        """The variables by which a client finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
        }

    def names(self, prefix: str) -> list[str]:
        """What is stored below a prefix, without it."""
        with self.lock:
            return sorted(x[len(prefix) :] for x in self.objects if x.startswith(prefix))


@contextlib.contextmanager
def listening(handler: type, **facts: Any) -> Iterator[str]:
    """The address of a server of this process, whose handlers have the facts."""
    handler = type("Handler", (handler,), facts)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def serving() -> Iterator[ObjectStore]:
    """A server, and no client in this process that has asked another."""
    store = ObjectStore()
    storage._bucket.cache_clear()
    try:
        with listening(_Handler, store=store) as store.address:
            yield store
    finally:
        storage._bucket.cache_clear()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    store: ObjectStore

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_gcs = url.path.startswith((_GCS, "/upload" + _GCS))
        path = url.path.removeprefix("/upload").removeprefix(_GCS) if is_gcs else url.path[1:]
        bucket, _, key = path.partition("/")
        key = key.removeprefix("o").removeprefix("/") if is_gcs else key
        name = f"{bucket}/{urllib.parse.unquote(key) or query.get('name', '')}"
        fault = self.store.fault(self.command, name)
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            self._send(name, fault, b"a fault", {})
        elif name.endswith("/"):
            self._list(bucket, query, is_gcs)
        else:
            self._object(name, query, body, is_gcs)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def _list(self, bucket: str, query: dict[str, str], is_gcs: bool) -> None:
        if self.command == "HEAD":
            self._send(bucket, 200, b"", {"x-amz-bucket-region": "us-east-1"})
            return
        after = query.get("pageToken", query.get("continuation-token", ""))
        prefix, first = query.get("prefix", ""), query.get("startOffset", "")
        last = query.get("endOffset") or "\U0010ffff"
        keys = [x for x in self.store.names(f"{bucket}/") if x.startswith(prefix)]
        keys = [x for x in keys if x > after and first <= x < last]
        shown, is_more = keys[: self.store.page], len(keys) > self.store.page
        if is_gcs:
            items = [{"name": x, "generation": "1"} for x in shown]
            more = {"nextPageToken": shown[-1]} if is_more else {}
            text = json.dumps({"items": items} | more)
        else:
            text = "".join(
                f"<Contents><Key>{escape(x)}</Key><Size>1</Size></Contents>" for x in shown
            )
            if is_more:
                text += f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
            text = f"<IsTruncated>{str(is_more).lower()}</IsTruncated>{text}"
            text = f"<ListBucketResult><KeyCount>{len(shown)}</KeyCount>{text}</ListBucketResult>"
        self._send(f"{bucket}/?{prefix}", 200, text.encode(), {})

    def _object(self, name: str, query: dict[str, str], body: bytes, is_gcs: bool) -> None:
        with self.store.lock:
            generation, content = self.store.objects.get(name, (0, b""))
            status = self._condition(query, generation)
            if status is None and self.command in ("PUT", "POST"):
                self.store.generation += 1
                generation, status = self.store.generation, 200
                self.store.objects[name] = generation, body
                facts = {"name": name, "generation": str(generation), "size": str(len(body))}
                content = json.dumps(facts).encode() if is_gcs else b""
            elif status is None and self.command == "DELETE":
                status = 204 if self.store.objects.pop(name, None) or not is_gcs else 404
                content = b""
            elif status is None:
                status = 200 if generation else 404
        headers = {"ETag": f'"{generation}"', "x-goog-generation": str(generation)}
        if status == 200 and (part := self.headers.get("Range")):
            first, last = part.removeprefix("bytes=").split("-")
            stop = min(int(last or len(content) - 1) + 1, len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, status = content[int(first) : stop], 206
        self._send(name, status, content if status in (200, 206) else b"", headers)

    def _condition(self, query: dict[str, str], generation: int) -> int | None:
        """The status of a request whose condition does not hold."""
        match = self.headers.get("If-Match") or query.get("ifGenerationMatch")
        no_match = self.headers.get("If-None-Match") or query.get("ifGenerationNotMatch")
        is_read = self.command in ("GET", "HEAD")
        if is_read and not generation:
            return 404
        if match is not None and match.strip('"') != str(generation):
            return 412
        if no_match == "*" or no_match == "0":
            return 412 if generation else None
        if no_match is not None and no_match.strip('"') == str(generation):
            return 304 if is_read else 412
        return None

    def _send(self, name: str, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.store.log.append((self.command, name, status))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
