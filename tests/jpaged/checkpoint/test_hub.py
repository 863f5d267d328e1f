import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from jpaged.checkpoint import hub

GGUF = b"GGUF" + bytes(range(256)) * 64
MODEL = hub.PackagedModel(
    requirements=("llm-tiny==1.0", "llm-tiny-rest==1.0"),
    file_name="tiny.gguf",
    parts=("llm_tiny/tiny.gguf.part0", "llm_tiny_rest/tiny.gguf.part1"),
    licence_members=("llm_tiny-1.0.dist-info/LICENSE",),
    sha256=hashlib.sha256(GGUF).hexdigest(),
    wheel_bytes=20_000,
    terms="Tiny comes under the Tiny Terms of Use",
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A stand-in for pip or, unpacking, for uv: brings two wheels, and counts how often."""
    folder, calls = tmp_path / "wheels", tmp_path / "calls"
    folder.mkdir()
    wheel, rest = (folder / f"llm_{name}-1.0-py3-none-any.whl" for name in ("tiny", "tiny_rest"))

    def publish(content: bytes = GGUF, unpacks: bool = False) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(MODEL.parts[0], content[:1000])
            archive.writestr(MODEL.licence_members[0], "Apache")
        with zipfile.ZipFile(rest, "w") as archive:
            archive.writestr(MODEL.parts[1], content[1000:])
        publish.unpacks = unpacks

    def download_command(requirements: tuple[str, ...], to: Path) -> list[str]:
        assert requirements == MODEL.requirements
        bring = (
            "shutil.unpack_archive(w, {to!r}, 'zip')"
            if publish.unpacks
            else "shutil.copy(w, {to!r})"
        )
        script = (
            f"import shutil; open({str(calls)!r}, 'a').write('x')\n"
            f"for w in {[str(wheel), str(rest)]!r}: {bring.format(to=str(to))}"
        )
        return [sys.executable, "-c", script]

    monkeypatch.setattr(hub, "_download_command", download_command)
    publish()
    publish.wheel = wheel
    publish.num_calls = lambda: len(calls.read_text()) if calls.exists() else 0
    return publish


def fetch(cache: Path) -> Path:
    return hub.fetch_packaged_model("tiny", MODEL, cache, show_progress=False)


def test_model_is_fetched_once_and_the_licence_is_kept_beside_it(index, tmp_path):
    path = fetch(tmp_path / "cache")
    assert path.read_bytes() == GGUF
    assert path.with_name("LICENSE").read_text() == "Apache"
    assert fetch(tmp_path / "cache") == path
    assert index.num_calls() == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        ".lock", "LICENSE", "tiny.gguf", "tiny.gguf.stamp",
    ]  # fmt: skip


def test_what_uv_unpacks_is_the_same(index, tmp_path):
    index(unpacks=True)
    path = fetch(tmp_path / "cache")
    assert path.read_bytes() == GGUF
    assert path.with_name("LICENSE").read_text() == "Apache"
    assert not list(path.parent.glob(".fetch-*"))


def test_terms_are_shown_when_a_model_is_fetched_and_not_later(index, tmp_path, caplog):
    for _ in range(2):
        fetch(tmp_path / "cache")
    assert caplog.messages == ["tiny: Tiny comes under the Tiny Terms of Use"]


def test_cached_model_is_not_hashed_again(index, tmp_path, monkeypatch):
    fetch(tmp_path / "cache")
    monkeypatch.setattr(hub, "_sha256", None)
    assert fetch(tmp_path / "cache").read_bytes() == GGUF


def test_touched_model_is_hashed_and_kept(index, tmp_path):
    path = fetch(tmp_path / "cache")
    os.utime(path, (1, 1))
    fetch(tmp_path / "cache")
    assert index.num_calls() == 1
    assert hub._is_stamped(path, MODEL.sha256)


def test_damaged_model_is_fetched_again(index, tmp_path):
    path = fetch(tmp_path / "cache")
    path.write_bytes(GGUF[:-1])
    assert fetch(tmp_path / "cache").read_bytes() == GGUF
    assert index.num_calls() == 2


def test_wrong_file_is_refused_and_leaves_nothing(index, tmp_path):
    index(b"GGUF other")
    with pytest.raises(ValueError, match=f"sha256.*{MODEL.sha256}"):
        fetch(tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache" / "tiny").iterdir()] == [".lock"]


def test_damaged_stamp_is_as_good_as_none(index, tmp_path):
    path = fetch(tmp_path / "cache")
    hub._stamp_path(path).write_bytes(b"\xff\xfe")
    assert fetch(tmp_path / "cache").read_bytes() == GGUF
    assert index.num_calls() == 1


@pytest.mark.parametrize(
    ("is_zip", "problem"), [(False, "not a zip file"), (True, "tiny.gguf.part0 is in none")]
)
def test_what_is_not_the_wheel_is_refused_with_its_name(is_zip, problem, index, tmp_path):
    index.wheel.write_bytes(b"no zip")
    if is_zip:
        with zipfile.ZipFile(index.wheel, "w") as archive:
            archive.writestr("other", b"")
    with pytest.raises(
        ValueError, match=rf"is not llm-tiny==1\.0, llm-tiny-rest==1\.0: .*{problem}"
    ):
        fetch(tmp_path / "cache")


def test_starts_at_the_same_time_fetch_once(index, tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(tmp_path / "cache").read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [GGUF] * 4
    assert index.num_calls() == 1


def test_failed_download_says_what_was_tried_and_why(tmp_path, monkeypatch):
    script = "import sys; print('noise'); sys.exit('No matching distribution')"
    monkeypatch.setattr(hub, "_download_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(ValueError, match=r"llm-tiny-rest==1\.0 failed: No matching distribution"):
        fetch(tmp_path / "cache")


def test_cache_that_cannot_be_written_is_named(index, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        fetch(tmp_path / "cache")


@pytest.mark.parametrize(
    ("has_pip", "on_path", "expected"),
    [
        (True, {"uv": "/bin/uv"}, [sys.executable, "-m", "pip", "download"]),
        (False, {"uv": "/bin/uv", "pip3": "/bin/pip3"}, ["/bin/uv", "pip", "install"]),
        (False, {"pip3": "/bin/pip3"}, ["/bin/pip3", "download"]),
    ],
)
def test_pip_of_the_environment_comes_first_then_uv(
    has_pip, on_path, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: object() if has_pip else None)
    monkeypatch.setattr(hub.shutil, "which", on_path.get)
    command = hub._download_command(("a==1", "b==2"), tmp_path)
    assert command[: len(expected)] == expected
    assert "--no-deps" in command and command[-2:] == ["a==1", "b==2"]


def test_without_pip_and_uv_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(hub.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="ensurepip"):
        hub._download_command(("a==1",), tmp_path)


@pytest.mark.parametrize(
    ("value", "parent"),
    [("/x/cache", "/x/cache"), ("relative", "/home/u/.cache"), ("", "/home/u/.cache")],
)
def test_cache_follows_the_xdg_specification(value, parent, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/u")
    assert hub.cache_home() == Path(parent) / "jpaged"


def test_hub_failure_is_one_error_with_the_remedy(monkeypatch, tmp_path):
    import huggingface_hub

    def refuse(*_, **__):
        raise ConnectionError("name resolution failed\nlong trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        ValueError, match=r"'org/name'.*name resolution failed\. Check .*HF_ENDPOINT"
    ) as e:
        hub.fetch_from_hugging_face("org/name", show_progress=False)
    assert "\n" not in str(e.value)


def test_hub_download_leaves_out_other_formats(monkeypatch, tmp_path):
    import fnmatch

    import huggingface_hub

    asked = {}

    def download(repo_id, *, revision, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = hub.fetch_from_hugging_face("org/name", revision="v1", show_progress=False)
    assert found == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("org/name", "v1")

    def is_wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in asked["patterns"])

    for name in (
        "config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja",
        "generation_config.json", "tokenizer.model",
    ):  # fmt: skip
        assert is_wanted(name), name
    for name in (
        "pytorch_model.bin", "consolidated.safetensors", "model.gguf", "modeling_x.py",
        "original/tokenizer.model", "README.md",
    ):  # fmt: skip
        assert not is_wanted(name), name
