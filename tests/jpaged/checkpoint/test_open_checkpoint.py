import shutil
from pathlib import Path

import pytest

import jpaged.checkpoint
from jpaged.checkpoint import open_checkpoint


def test_name_follows_what_the_caller_said(tiny_model, monkeypatch):
    directory = tiny_model("gqa")
    assert open_checkpoint(directory).name == directory.name
    assert open_checkpoint("smollm2").name == "smollm2"
    monkeypatch.setattr(
        jpaged.checkpoint, "fetch_from_hugging_face", lambda *_, **__: Path(directory)
    )
    assert open_checkpoint("org/name", revision="main").name == "org/name"


def test_existing_path_comes_before_the_hub(tiny_model, tmp_path, monkeypatch):
    shutil.copytree(tiny_model("gqa"), tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jpaged.checkpoint, "fetch_from_hugging_face", None)
    assert open_checkpoint("org/name").name == "name"


@pytest.mark.parametrize("model", ["nothing", "/no/such/path", "./org/name", "a/b/c", ""])
def test_what_is_no_path_and_no_hub_id_is_refused(model):
    with pytest.raises(FileNotFoundError, match="no such path"):
        open_checkpoint(model)


def test_pathlike_that_does_not_exist_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr(jpaged.checkpoint, "fetch_from_hugging_face", None)
    with pytest.raises(FileNotFoundError, match="no such path"):
        open_checkpoint(Path("org/name"))


def test_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"not \.gguf"):
        open_checkpoint(path)


def test_revision_belongs_to_hub_ids(tiny_model):
    for model in ("smollm2", tiny_model("gqa")):
        with pytest.raises(ValueError, match="revision is 'v1'"):
            open_checkpoint(model, revision="v1")
