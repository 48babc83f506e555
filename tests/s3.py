"""S3 as moto plays it, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def played_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that is there inside; skipped where moto or s3fs is missing."""
    s3fs = pytest.importorskip("s3fs", reason='pip install "batchwright[s3]"')
    moto = pytest.importorskip("moto.server", reason='pip install "moto[s3,server]"')
    import boto3

    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield boto3.client("s3")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
