"""What a path in a config means."""

import pytest

from paths import PROJECT_DIR, missing_path, project_path


@pytest.mark.parametrize("path", ["data", "./data", "data/*.md", str(PROJECT_DIR)])
def test_what_is_there(path):
    assert not missing_path(path)


@pytest.mark.parametrize(
    "path",
    ["data/nope", "./nope", "/nope/x", "~/nope", "~nobody/x", "a/b/c", "a/x.parquet", "a/*.nope", "x" * 300 + "/b/c"],
)
def test_what_can_only_be_a_path(path):
    assert missing_path(path)


def test_empty_text_is_no_path():
    assert missing_path("") and project_path("") == ""


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "mlfoundations/dclm-baseline-1.0", "json"])
def test_names_on_the_hub(name):
    assert not missing_path(name)
    assert project_path(name) == name


def test_a_folder_named_like_an_owner_hides_nothing_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "meta-llama" / "Llama-3.2-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not missing_path("meta-llama/Llama-3.1-8B")


def test_home_and_working_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert project_path("~/mine") == str(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert project_path("mine") == str(tmp_path / "mine")
