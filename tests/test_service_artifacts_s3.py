"""Artifacts on S3, as moto plays it; where `s3fs` and `moto[s3,server]` are installed."""

from __future__ import annotations

import os

import pytest

from artifacts import bring, leased, restarted
from batchwright.errors import BatchwrightError
from batchwright.service.problems import NotFound, Refused, Unavailable
from batchwright.service.store import artifact_place
from batchwright.service.store.artifact_place import ArtifactPlace
from s3 import played_s3

NAME = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def bucket(monkeypatch):
    """The URL of a folder in a bucket, and a client to look into it with."""
    with played_s3(monkeypatch) as client:
        client.create_bucket(Bucket="kept")
        yield "s3://kept/artifacts", client


def objects_in(client):
    return [one["Key"] for one in client.list_objects_v2(Bucket="kept").get("Contents", ())]


def test_files_of_jobs_are_kept_on_s3(service, bucket):
    url, client = bucket
    kept = restarted(service, artifacts=url)
    lease = leased(kept)
    first, second = os.urandom(20 * 2**20), b"second"
    for content in (first, second):
        assert bring(kept, lease, "last.pt", content).status_code == 200
        path = f"/v1/jobs/{lease.job.id}/artifacts/last.pt"
        assert kept.get("read", path).content == content
    assert bring(kept, lease, "last.pt", b"announced", sent=b"not this").status_code == 422
    assert kept.app.state.remover.wait(300)
    assert len(objects_in(client)) == 1
    (key,) = objects_in(client)
    client.delete_object(Bucket="kept", Key=key)
    assert kept.get("read", path).status_code == 404


def test_an_upload_to_s3_that_fails_leaves_no_object(bucket, monkeypatch):
    monkeypatch.setattr(artifact_place, "BLOCK", 5 * 2**20)
    url, client = bucket
    place = ArtifactPlace(url)
    assert objects_in(client) == []

    def break_off():
        with place.writing(NAME) as file:
            file.write(os.urandom(12 * 2**20))
            raise Refused("broken off")

    with pytest.raises(Refused):
        break_off()
    assert objects_in(client) == []
    with pytest.raises(NotFound), place.reading(NAME) as file:
        file.read(1)
    place.remove(NAME)  # again changes nothing


def test_a_bucket_that_is_not_there_or_not_ours_is_refused_in_a_line(bucket, monkeypatch):
    with pytest.raises(BatchwrightError) as caught:
        ArtifactPlace("s3://no-such-bucket/artifacts")
    assert "\n" not in str(caught.value)
    place = ArtifactPlace(bucket[0])
    bucket[1].delete_bucket(Bucket="kept")
    with pytest.raises((Unavailable, NotFound)), place.writing(NAME) as file:
        file.write(b"x")
