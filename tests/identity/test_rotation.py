"""Certificates are rotated while connections begin."""

import json
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from disaggregated_inference.identity import Identity
from disaggregated_inference.identity.authority import CERTIFICATE, KEY
from disaggregated_inference.identity.contexts import RotatedContext
from tests.support.identities import Cluster


@pytest.mark.slow
def test_no_process_dies_of_a_rotation(tmp_path: Path) -> None:
    """OpenSSL crashed in two of three such runs of four seconds, where a context in use was changed."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.support.rotating_identity",
        str(tmp_path / "keys"),
        "4",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["rotated"] > 5
    assert found["begun"] > 1000
    assert min(found["connected"], found["refused"]) > 5
    assert found["certificates"] > 1
    assert found["left"] == 0, "a descriptor of each connection that failed"


def test_a_context_in_use_is_never_changed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "keys")
    identity = cluster.identity("spark")
    contexts = (identity.server_context, identity.client_context, identity.kv_client_context)
    before = [context.now for context in contexts]
    cluster.authority.rotate("spark")
    assert identity.refresh()
    assert all(context.now is not old for context, old in zip(contexts, before, strict=True))
    for context in contexts:
        assert (context.now.verify_mode, context.now.minimum_version) == (context.verify_mode, context.minimum_version)
        assert context.now.check_hostname == context.check_hostname


def test_files_that_change_while_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is what is used: else a node would sign with one key and show another's certificate."""
    cluster = Cluster(tmp_path / "keys")
    identity, other = cluster.identity("spark"), cluster.folder_of("mac")
    cluster.authority.rotate("spark")
    kept, begun = [context.now for context in identity.contexts], identity.with_certificate

    def copy_another(context: RotatedContext) -> ssl.SSLContext:
        for name in (KEY, CERTIFICATE):
            (identity.folder / name).write_bytes((other / name).read_bytes())
        return begun(context)

    monkeypatch.setattr(identity, "with_certificate", copy_another)
    assert not identity.refresh()
    assert ([context.now for context in identity.contexts], identity.name) == (kept, "spark")
    monkeypatch.undo()
    assert identity.refresh()
    assert identity.name == "mac"
    assert Identity(identity.folder).name == "mac"
