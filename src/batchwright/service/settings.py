"""What an operator decides about a service."""

from __future__ import annotations

from pydantic import Field, SecretStr

from batchwright.records.base import Count, NonNegative, Positive, Record

DAY = 24 * 3600.0
MIB = 2**20
GIB = 2**30


class Limits(Record):
    """What is refused, so that no client can bring the service down."""

    body_bytes: Count = Field(8 * MIB, description="Of a request.")
    nesting: Count = Field(32, description="Levels of lists and objects in a body.")
    values: Count = Field(400_000, description="In a body of JSON: items, and values of keys.")
    requests_per_second: Positive = Field(200.0, description="Of one token or address, sustained.")
    burst: Count = Field(800, description="Requests beyond that at once.")
    runs: Count = Field(100_000, description="Stored in all.")
    records_per_run: Count = Field(20_000_000, description="Stored of one run.")
    profiles: Count = Field(1000, description="Uploaded ones, stored in all.")
    open_jobs: Count = Field(1000, description="Neither done, failed nor cancelled.")
    artifact_bytes: Count = Field(64 * GIB, description="Of artifacts, stored in all.")
    artifact_bytes_per_job: Count = Field(16 * GIB, description="Of artifacts of one job.")
    transfers: Count = Field(32, description="Artifacts that come or go at the same time.")


class Settings(Record):
    """How a service is run; the options of ``batchwright serve``."""

    database: str = Field(description="SQLAlchemy's URL.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8400, ge=0, le=65535, description="0: any that is free.")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Names in the Host header beside loopback's and `host`."
    )
    public_url: str | None = Field(
        None, description="Address by which browsers reach it through a proxy, for sign-in links."
    )
    secure_cookies: bool = Field(
        False, description="Whether browsers may send the cookie over HTTPS only."
    )
    retention_days: Positive | None = Field(
        None,
        description="Ended runs and jobs, uploaded profiles and the audit log's rows are deleted "
        "when so old; null: kept.",
    )
    lease_seconds: float = Field(
        30.0, ge=5.0, description="An agent silent for so long may lose its job to another."
    )
    keep_seconds: NonNegative = Field(
        600.0,
        description="How much longer a job that is being trained is kept for its agent, whose "
        "folder has the checkpoints; a job may say otherwise.",
    )
    silent_seconds: Positive = Field(60.0, description="A run silent for so long is shown as such.")
    session_seconds: Positive = Field(7 * DAY, description="How long a browser stays signed in.")
    link_seconds: Positive = Field(600.0, description="How long a sign-in link works.")
    artifacts: str | None = Field(
        None, description="Folder or fsspec's URL that takes the artifacts of jobs; null: none."
    )
    webhook: str | None = Field(None, description="Address that notices of problems are posted to.")
    webhook_secret: SecretStr | None = Field(None, description="Key that signs the notices.")
    limits: Limits = Limits()
