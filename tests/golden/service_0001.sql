CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE tokens (
    id INTEGER NOT NULL,
    name VARCHAR(120) NOT NULL,
    hash VARCHAR(64) NOT NULL,
    scopes VARCHAR(100) NOT NULL,
    created FLOAT NOT NULL,
    used FLOAT,
    revoked FLOAT,
    CONSTRAINT pk_tokens PRIMARY KEY (id),
    CONSTRAINT uq_tokens_hash UNIQUE (hash),
    CONSTRAINT uq_tokens_name UNIQUE (name)
);
CREATE TABLE links (
    hash VARCHAR(64) NOT NULL,
    scopes VARCHAR(100) NOT NULL,
    expires FLOAT NOT NULL,
    CONSTRAINT pk_links PRIMARY KEY (hash)
);
CREATE TABLE sessions (
    hash VARCHAR(64) NOT NULL,
    scopes VARCHAR(100) NOT NULL,
    created FLOAT NOT NULL,
    expires FLOAT NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (hash)
);
CREATE TABLE runs (
    id VARCHAR(36) NOT NULL,
    name VARCHAR(120) NOT NULL,
    owner VARCHAR(120) NOT NULL,
    outcome VARCHAR(20),
    created FLOAT NOT NULL,
    changed FLOAT NOT NULL,
    next_sequence BIGINT NOT NULL,
    counts TEXT NOT NULL,
    advice INTEGER NOT NULL,
    epochs BIGINT NOT NULL,
    workers BIGINT NOT NULL,
    method VARCHAR(40) NOT NULL,
    network TEXT NOT NULL,
    data TEXT NOT NULL,
    epochs_done BIGINT NOT NULL,
    top1 FLOAT,
    global_batch_size BIGINT NOT NULL,
    follows_advice BOOLEAN NOT NULL,
    demo BOOLEAN NOT NULL,
    job_id VARCHAR(36),
    error TEXT,
    "plan" TEXT NOT NULL,
    profile TEXT,
    summary TEXT,
    CONSTRAINT pk_runs PRIMARY KEY (id)
);
CREATE INDEX ix_runs_created ON runs (created);
CREATE INDEX ix_runs_job_id ON runs (job_id);
CREATE TABLE records (
    run_id VARCHAR(36) NOT NULL,
    sequence BIGINT NOT NULL,
    kind VARCHAR(20) NOT NULL,
    level INTEGER NOT NULL,
    body TEXT NOT NULL,
    CONSTRAINT pk_records PRIMARY KEY (run_id, sequence),
    CONSTRAINT fk_records_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
CREATE INDEX ix_records_level ON records (run_id, kind, level, sequence);
CREATE TABLE advice (
    run_id VARCHAR(36) NOT NULL,
    number INTEGER NOT NULL,
    created FLOAT NOT NULL,
    epoch BIGINT NOT NULL,
    reason TEXT NOT NULL,
    "plan" TEXT NOT NULL,
    taken BIGINT,
    CONSTRAINT pk_advice PRIMARY KEY (run_id, number),
    CONSTRAINT fk_advice_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE jobs (
    id VARCHAR(36) NOT NULL,
    name VARCHAR(120) NOT NULL,
    owner VARCHAR(120) NOT NULL,
    state VARCHAR(20) NOT NULL,
    auto BOOLEAN NOT NULL,
    approved BOOLEAN NOT NULL,
    cancelling BOOLEAN NOT NULL,
    created FLOAT NOT NULL,
    changed FLOAT NOT NULL,
    job TEXT NOT NULL,
    profile TEXT,
    "plan" TEXT,
    run_id VARCHAR(36),
    agent VARCHAR(120),
    lease_key VARCHAR(36),
    lease_expires FLOAT,
    attempts INTEGER NOT NULL,
    lost INTEGER NOT NULL,
    error TEXT,
    CONSTRAINT pk_jobs PRIMARY KEY (id)
);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_jobs_created ON jobs (created);
CREATE TABLE agents (
    name VARCHAR(120) NOT NULL,
    owner VARCHAR(120) NOT NULL,
    allow TEXT NOT NULL,
    seen FLOAT NOT NULL,
    CONSTRAINT pk_agents PRIMARY KEY (name)
);
CREATE TABLE profiles (
    id VARCHAR(36) NOT NULL,
    name VARCHAR(120) NOT NULL,
    created FLOAT NOT NULL,
    body TEXT NOT NULL,
    CONSTRAINT pk_profiles PRIMARY KEY (id)
);
CREATE TABLE audit (
    id INTEGER NOT NULL,
    at FLOAT NOT NULL,
    who VARCHAR(120) NOT NULL,
    action VARCHAR(40) NOT NULL,
    subject VARCHAR(120) NOT NULL,
    detail TEXT NOT NULL,
    CONSTRAINT pk_audit PRIMARY KEY (id)
);
CREATE INDEX ix_audit_at ON audit (at);

INSERT INTO alembic_version VALUES ('0001');
