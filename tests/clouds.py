"""Google's and Azure's object stores, as their emulators play them on this machine."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Put = Callable[[str, bytes], object]
"""Writes an object of the bucket ``pets``: its path there and its content."""


@contextmanager
def played_gs(_: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """A bucket of Google's; skipped where the emulator or gcsfs is missing."""
    # Asking what kind of bucket it is goes by gRPC over TLS, which no emulator answers: a minute.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcsfs = pytest.importorskip("gcsfs", reason='pip install "batchwright[gs]"')
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="pip install gcp-storage-emulator"
    )
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="pets")
    server.start()
    port = server._api._httpd.server_address[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    try:
        client = gcsfs.GCSFileSystem(skip_instance_cache=True)
        yield lambda path, content: client.pipe_file(f"pets/{path}", content)
    finally:
        gcsfs.GCSFileSystem.clear_instance_cache()
        server.stop()


@contextmanager
def played_az(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """A container of Azure's; skipped where Azurite or adlfs is missing."""
    adlfs = pytest.importorskip("adlfs", reason='pip install "batchwright[az]"')
    command = shutil.which("azurite-blob")
    if not command:
        pytest.skip("npm install --global azurite")
    from azure.storage.blob import BlobServiceClient

    key = base64.b64encode(b"a key of this test").decode()
    monkeypatch.setenv("AZURITE_ACCOUNTS", f"tests:{key}")
    server = subprocess.Popen(
        [command, "--blobPort=0", "--skipApiVersionCheck", "--disableTelemetry"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        said = ""
        while not (at := re.search(r"listens on (http://\S+)", said)):
            line = server.stdout.readline()
            assert line, said  # it has ended
            said += line
        joined = f"AccountName=tests;AccountKey={key};BlobEndpoint={at[1]}/tests;"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", joined)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        with BlobServiceClient.from_connection_string(joined) as client:
            pets = client.create_container("pets")
            yield lambda path, content: pets.upload_blob(path, content, overwrite=True)
    finally:
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        server.kill()
        server.communicate()
