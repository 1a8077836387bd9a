"""Files that readers see whole, whatever happens while they are written."""

import json
from pathlib import Path

import pytest

from memer.folders import read_json, replacing, write_json


def test_a_file_appears_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "text.txt"
    with replacing(path, durable=True) as temporary:
        temporary.write_text("half", encoding="utf-8")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "half"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(UnicodeEncodeError), replacing(path) as temporary:
        temporary.write_text("half \udc80", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "old"


def test_json_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    write_json(path, {"word": "gr\u00fcn"}, durable=True)
    with pytest.raises(TypeError):
        write_json(path, {"word": object()})
    assert read_json(path) == json.loads(path.read_text(encoding="utf-8")) == {"word": "gr\u00fcn"}
    assert list(tmp_path.iterdir()) == [path]
