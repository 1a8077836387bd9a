from pathlib import Path

import pytest

from models.prompt_encoder import PromptEncoder
from models.qwen_vl import LoadedBase, load_base, load_encoder
from tests.models.samples import tiny_base, tiny_contract


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def loaded(base: Path) -> LoadedBase:
    return load_base(base)


@pytest.fixture(scope="session")
def encoder(base: Path) -> PromptEncoder:
    return load_encoder(base, tiny_contract())
