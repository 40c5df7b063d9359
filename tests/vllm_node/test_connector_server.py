"""The socket where the connector meets the node."""

import socket
from pathlib import Path

import pytest

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.staging import Staging
from tests.support.paged_model import spec


def open_border(path: Path) -> ConnectorServer:
    return ConnectorServer(path, spec(), Staging(1 << 20))


def test_a_file_at_the_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(BadRequest, match=r"notes exists and is no socket: give another --vllm-socket"):
        open_border(path)
    assert path.read_text() == "mine"


def test_a_socket_that_another_node_uses_is_refused(tmp_path: Path) -> None:
    first = open_border(tmp_path / "s")
    with pytest.raises(BadRequest, match="another node listens at"):
        open_border(tmp_path / "s")
    first.close()
    assert not (tmp_path / "s").exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    border = open_border(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.write_text("of another")
    border.close()
    assert path.read_text() == "of another"
