"""docs/CLUSTER_FILE.md is what `disagg config reference` prints."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from disaggregated_inference.cli.config import config_app
from disaggregated_inference.cluster import ModelOptions, Policies, Server
from disaggregated_inference.cluster.config import ClusterFile, Link
from disaggregated_inference.cluster.machines import ClusterMachine, GatewayService, ModelSource
from disaggregated_inference.cluster.reference import section
from disaggregated_inference.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "CLUSTER_FILE.md"


def test_the_page_is_what_the_command_prints() -> None:
    run = CliRunner().invoke(config_app, ["reference"])
    assert run.exit_code == 0
    assert run.stdout == PAGE.read_text(), "run `disagg config reference > docs/CLUSTER_FILE.md`"


MACHINE_KINDS = (ClusterMachine, ModelSource, GatewayService)


@pytest.mark.parametrize("kind", [ClusterFile, Server, Link, ModelOptions, Policies, *MACHINE_KINDS])
def test_every_field_has_a_type_a_default_and_a_sentence(kind: type[msgspec.Struct]) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    for field in msgspec.structs.fields(kind):
        [*found] = [row for row in rows if row[0] == f"`{field.name}`"]
        assert found, f"{field.name} is missing"
        for _, type_, default, sentence in found:
            assert type_.split()[0].rstrip(":,") in ("string", "integer", "number", "boolean", "list", "object")
            assert default
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert len(sentence) > len("A number.")


def test_a_field_without_a_comment_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"_Silent\.size has no comment: write one sentence"):
        section(_Silent, "Silent")


class _Silent(msgspec.Struct):
    """A struct whose field says nothing."""

    size: int
