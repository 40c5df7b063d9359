"""The tables of a grade book. `PRAGMA user_version` is the version of this layout."""

VERSION = 1

TABLES = """
CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE blobs (sha256 TEXT PRIMARY KEY, content BLOB NOT NULL);

CREATE TABLE assignments (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    solution_sha TEXT REFERENCES blobs (sha256),
    template_sha TEXT REFERENCES blobs (sha256),
    inputs TEXT NOT NULL DEFAULT '{}',     -- data files of a re-run: name to sha256
    rerun INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE rubric_versions (
    id INTEGER PRIMARY KEY,
    assignment_id INTEGER NOT NULL REFERENCES assignments (id),
    number INTEGER NOT NULL,
    hash TEXT NOT NULL,
    content TEXT NOT NULL,
    note TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    UNIQUE (assignment_id, number)
);
CREATE TABLE students (                    -- the only table with names
    id INTEGER PRIMARY KEY,
    pseudonym TEXT NOT NULL UNIQUE,
    student_key TEXT NOT NULL UNIQUE,      -- what identifies a student in file names
    identity TEXT NOT NULL
);
CREATE TABLE submissions (
    id INTEGER PRIMARY KEY,
    assignment_id INTEGER NOT NULL REFERENCES assignments (id),
    student_id INTEGER NOT NULL REFERENCES students (id),
    blob_sha TEXT NOT NULL REFERENCES blobs (sha256),
    file_name TEXT NOT NULL,               -- as the student named it: private
    late_days REAL NOT NULL DEFAULT 0,
    added_at REAL NOT NULL,
    current_key TEXT,                      -- of the newest grading
    superseded INTEGER NOT NULL DEFAULT 0, -- a newer file of the same student is there
    UNIQUE (assignment_id, student_id, blob_sha)
);

CREATE TABLE jobs (
    submission_id INTEGER NOT NULL REFERENCES submissions (id),
    key TEXT NOT NULL,                     -- hash of rubric and settings
    stage TEXT NOT NULL,                   -- checks, then models
    rubric_version_id INTEGER NOT NULL REFERENCES rubric_versions (id),
    settings TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting', -- waiting, running, done, failed
    worker TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,   -- started and not finished
    not_before REAL NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    queued_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    PRIMARY KEY (submission_id, key, stage)
);
CREATE INDEX jobs_by_state ON jobs (state, stage);
CREATE TABLE workers (name TEXT PRIMARY KEY, pid INTEGER NOT NULL, started TEXT NOT NULL, seen_at REAL NOT NULL);
CREATE TABLE journal (                     -- one row for every finished stage; nothing is finished twice
    id INTEGER PRIMARY KEY,
    submission_id INTEGER NOT NULL,
    key TEXT NOT NULL,
    stage TEXT NOT NULL,
    worker TEXT NOT NULL,
    seconds REAL NOT NULL,
    at REAL NOT NULL
);

CREATE TABLE gradings (
    submission_id INTEGER NOT NULL REFERENCES submissions (id),
    key TEXT NOT NULL,
    rubric_version_id INTEGER NOT NULL REFERENCES rubric_versions (id),
    record TEXT NOT NULL,                  -- hashes, seeds, versions
    checks TEXT,                           -- layers 1 and 2
    models TEXT,                           -- layers 3 and 4
    made_at REAL NOT NULL,
    PRIMARY KEY (submission_id, key)
);
CREATE TABLE reruns (blob_sha TEXT NOT NULL, settings_hash TEXT NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (blob_sha, settings_hash));
CREATE TABLE class_reports (hash TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE answers (                     -- raw prompts and answers
    id INTEGER PRIMARY KEY,
    submission_id INTEGER NOT NULL REFERENCES submissions (id),
    key TEXT NOT NULL,
    layer TEXT NOT NULL,                   -- code, feedback
    reading INTEGER NOT NULL,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    answer TEXT NOT NULL,
    error TEXT NOT NULL,
    figures TEXT NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX answers_by_grading ON answers (submission_id, key);

CREATE TABLE changes (                     -- what people did; rows are only added
    id INTEGER PRIMARY KEY,
    submission_id INTEGER NOT NULL REFERENCES submissions (id),
    item TEXT NOT NULL DEFAULT '',         -- of the rubric; empty: the whole submission
    action TEXT NOT NULL,                  -- points, comment, approve, reopen, undo
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    at REAL NOT NULL,
    undoes INTEGER REFERENCES changes (id)
);
CREATE INDEX changes_by_submission ON changes (submission_id);
CREATE TABLE comments (
    id INTEGER PRIMARY KEY,
    assignment_id INTEGER NOT NULL REFERENCES assignments (id),
    item TEXT NOT NULL DEFAULT '',
    text TEXT NOT NULL,
    who TEXT NOT NULL,
    at REAL NOT NULL,
    UNIQUE (assignment_id, item, text)
);
CREATE TABLE reveals (id INTEGER PRIMARY KEY, who TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL,
    at REAL NOT NULL);
"""
