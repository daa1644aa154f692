"""Folders of pretrained models that tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_folders import saved


def folder_of(name: str, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp(name)
    saved(folder, name)
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("gpt2", tmp_path_factory)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama", tmp_path_factory)
