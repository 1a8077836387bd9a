"""Manifests: what a directory holds is said before any of it is read."""

import json
from pathlib import Path

import pytest

from data.features import FeatureSet
from data.shards import ShardSet
from memer.errors import MemerError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "format None, this program reads"),
        ("{", "not JSON"),
        (json.dumps({"format": 1}), "describes no"),
    ],
)
@pytest.mark.parametrize("kind", [ShardSet, FeatureSet])
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, kind: type, content: str, message: str
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(MemerError, match=message):
        kind(tmp_path)
