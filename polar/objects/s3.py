"""Objects in an S3 bucket through the `minio` SDK.

The SDK has no argument for a conditional write, so put_if_absent is a presigned PUT with `If-None-Match: *`
(answered 412 when the key exists: S3 API, PutObject, conditional writes).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from polar.errors import InvalidConfig, NotFound, PolarError
from polar.objects.base import check_key

T = TypeVar("T")
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_MISSING = {"NoSuchKey", "NoSuchObject"}


class S3Store:
    def __init__(self, client: Minio, bucket: str, prefix: str = ""):
        self.client = client
        self.bucket = bucket
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        # minio-py's connect timeout also bounds the sending of the body: a short one fails large uploads.
        timeout = urllib3.Timeout(connect=120, read=120)
        self.http = urllib3.PoolManager(timeout=timeout, maxsize=32, ca_certs=os.environ.get("SSL_CERT_FILE"))

    @classmethod
    def from_url(cls, url: str) -> S3Store:
        parts = urlsplit(url)
        query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
        unknown = set(query) - {"endpoint", "region", "create"}
        if unknown or not parts.netloc:
            raise InvalidConfig(f"objects URL '{url}': expected s3://bucket[/prefix]?endpoint=…[&region=…][&create=1]")
        if not _BUCKET.match(parts.netloc):
            raise InvalidConfig(f"objects URL '{url}': '{parts.netloc}' is no bucket name; allowed: {_BUCKET.pattern}")
        endpoint = query.get("endpoint", "https://s3.amazonaws.com")
        e = urlsplit(endpoint)
        if e.scheme not in ("http", "https") or not e.netloc:
            raise InvalidConfig(f"objects URL '{url}': endpoint '{endpoint}' is not an http(s) URL")
        client = Minio(
            e.netloc,
            access_key=os.environ.get("AWS_ACCESS_KEY_ID"),
            secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
            session_token=os.environ.get("AWS_SESSION_TOKEN"),
            secure=e.scheme == "https",
            region=query.get("region", "us-east-1"),
        )
        store = cls(client, parts.netloc, parts.path)
        if query.get("create") == "1" and not store._try("bucket", lambda: client.bucket_exists(parts.netloc)):
            try:
                store._try("bucket", lambda: client.make_bucket(parts.netloc))
            except PolarError:
                # Another process may have been quicker.
                if not store._try("bucket", lambda: client.bucket_exists(parts.netloc)):
                    raise
        return store

    def put(self, key: str, data: bytes) -> None:
        k = self._key(key)
        self._try(key, lambda: self.client.put_object(self.bucket, k, io.BytesIO(data), len(data)))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        k = self._key(key)
        url = self._try(key, lambda: self.client.presigned_put_object(self.bucket, k, expires=timedelta(minutes=10)))
        # A lost answer must not be repeated blindly: the repeat would see its own object and report False.
        reply = self._try(
            key, lambda: self.http.request("PUT", url, body=data, headers={"If-None-Match": "*"}, retries=False)
        )
        if reply.status in (409, 412):
            return False
        if reply.status != 200:
            raise PolarError(
                f"object '{key}': the store answered {reply.status}", code="store_unavailable", retryable=True
            )
        return True

    def put_file(self, key: str, path: Path) -> None:
        k = self._key(key)
        self._try(key, lambda: self.client.fput_object(self.bucket, k, str(path)))

    def get(self, key: str) -> bytes:
        def read() -> bytes:
            reply = self.client.get_object(self.bucket, self._key(key))
            try:
                return reply.read()
            finally:
                reply.close()
                reply.release_conn()

        return self._try(key, read)

    def get_file(self, key: str, path: Path) -> None:
        k = self._key(key)
        self._try(key, lambda: self.client.fget_object(self.bucket, k, str(path)))

    def exists(self, key: str) -> bool:
        k = self._key(key)
        try:
            self._try(key, lambda: self.client.stat_object(self.bucket, k))
        except NotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        full = self.prefix + prefix
        names = self._try(
            prefix, lambda: [o.object_name for o in self.client.list_objects(self.bucket, prefix=full, recursive=True)]
        )
        return iter(sorted(str(n)[len(self.prefix) :] for n in names if n))

    def delete(self, key: str) -> None:
        k = self._key(key)
        try:
            self._try(key, lambda: self.client.remove_object(self.bucket, k))
        except NotFound:
            pass

    def _key(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _try(self, key: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except S3Error as e:
            if e.code in _MISSING:
                raise NotFound(f"no object '{key}'") from e
            raise PolarError(f"object '{key}': {e.code}: {e.message}", code="store_unavailable", retryable=True) from e
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as e:
            raise PolarError(f"object '{key}': {_short(e)}", code="store_unavailable", retryable=True) from e


def _short(e: Any) -> str:
    return f"{type(e).__name__}: {e}"[:300]
