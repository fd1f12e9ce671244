from __future__ import annotations

import os
import shlex
import shutil
import threading
import zlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from int4_checkpoints import CASES as WIDE
from random_checkpoints import write_checkpoint

from colibrid.errors import ConfigError, ModelError
from colibrid.model import cache
from colibrid.model.cache import BUNDLED_MODEL, CacheOptions, Resolved, locate, resolve
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def options(tmp_path: Path) -> CacheOptions:
    """Empty folders."""
    return CacheOptions(cache_dir=tmp_path / "cache", hub_cache=tmp_path / "hub")


def _resolve(model: str | None, options: CacheOptions) -> Resolved:
    return resolve(model, options, crc32c=zlib.crc32)


def _hub(options: CacheOptions, source: Path, revision: str = "a" * 40, *, main: bool = True) -> Path:
    """Puts a checkpoint where Hugging Face's own tools put it: links into a folder of blobs."""
    folder = options.hub_cache / "models--org--name"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(source.iterdir()):
        blob = folder / "blobs" / f"{revision[0]}{number}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(blob)
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(f"{revision}\n")
    return snapshot


def test_without_a_model_the_bundled_one_is_converted_once(options: CacheOptions) -> None:
    """The first call converts the bundled checkpoint into the cache, the second finds it there."""
    first = _resolve(None, options)
    assert (first.name, first.converted) == ("hummingbird-13m", True)
    assert open_pack(first.path).manifest.name == "hummingbird-13m"
    second = _resolve(None, options)
    assert (second.path, second.converted) == (first.path, False)
    assert locate(None, options.hub_cache).path == BUNDLED_MODEL


def test_a_pack_is_used_as_it_is(pack: Path, options: CacheOptions) -> None:
    """A pack needs no cache folder."""
    assert _resolve(str(pack), options).path == pack
    assert not options.cache_dir.exists()


def test_a_checkpoint_folder_is_converted(source: Path, options: CacheOptions) -> None:
    """The pack is called after the folder."""
    made = _resolve(str(source), options)
    assert made.path.parent == options.cache_dir
    assert made.path.name.startswith("src-")
    assert open_pack(made.path).manifest.family == "Qwen2MoeForCausalLM"


@pytest.mark.parametrize("change", ["config", "weights", "text", "dtype"])
def test_every_change_of_the_checkpoint_makes_another_pack(change: str, source: Path, options: CacheOptions) -> None:
    """Configuration, weights' size or time, texts and precision are part of the key."""
    first = _resolve(str(source), options)
    if change == "config":
        text = (source / "config.json").read_text()
        (source / "config.json").write_text(text.replace("10000.0", "20000.0"))
    if change == "weights":
        os.utime(source / "model.safetensors", ns=(0, 12345))
    if change == "text":
        (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    if change == "dtype":
        options = CacheOptions(cache_dir=options.cache_dir, hub_cache=options.hub_cache, dtype="fp16")
    second = _resolve(str(source), options)
    assert second.converted
    assert second.path != first.path


def test_a_changed_text_is_in_the_new_pack(source: Path, options: CacheOptions) -> None:
    """A new end id is not hidden by an older pack of the cache."""
    _resolve(str(source), options)
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert open_pack(_resolve(str(source), options).path).manifest.text.eos_token_ids == (3,)


def test_a_hub_name_is_found_in_the_local_cache(source: Path, options: CacheOptions) -> None:
    """org/name means the snapshot that main points to, and is the model's id."""
    old = _hub(options, source, "b" * 40, main=False)
    new = _hub(options, source)
    os.utime(old, ns=(1 << 62, 1 << 62))
    assert locate("org/name", options.hub_cache).path == new
    made = _resolve("org/name", options)
    assert made.name == "org/name"
    assert made.path.name.startswith("org-name-")
    assert open_pack(made.path).manifest.name == "org/name"


def test_without_a_main_the_newest_snapshot_is_taken(source: Path, options: CacheOptions) -> None:
    """A cache without refs, or with a broken one, still works."""
    _hub(options, source, "b" * 40, main=False)
    assert locate("org/name", options.hub_cache).path.name == "b" * 40
    (options.hub_cache / "models--org--name" / "refs").mkdir()
    (options.hub_cache / "models--org--name" / "refs" / "main").write_text("../../../../etc")
    assert locate("org/name", options.hub_cache).path.name == "b" * 40


def test_an_absent_hub_name_says_the_command(options: CacheOptions) -> None:
    """Nothing is downloaded; the message holds the exact command, in which every pattern has its own --include."""
    with pytest.raises(ModelError, match="hf download org/name --include") as caught:
        _resolve("org/name", options)
    words = shlex.split(str(caught.value).splitlines()[1])[3:]
    # A pattern without one would be taken for a file name, and then those are all that is fetched.
    assert words[0::2] == ["--include"] * 3
    assert words[1::2] == ["*.safetensors", "*.json", "*.jinja"]
    assert str(options.hub_cache) in str(caught.value)


@pytest.mark.parametrize("model", ["nothing", "a/b/c", "../x/y", "/none", "", "org/na me", "org/name;rm"])
def test_other_names_are_refused(
    model: str, options: CacheOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is neither a folder nor org/name is an error that says what MODEL can be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no such folder|neither a pack"):
        _resolve(model, options)


def test_a_file_or_an_empty_folder_is_refused(options: CacheOptions, tmp_path: Path) -> None:
    """MODEL is a folder with a pack or a checkpoint in it."""
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelError, match="not a folder"):
        _resolve(str(tmp_path / "x.gguf"), options)
    with pytest.raises(ModelError, match="neither a pack"):
        _resolve(str(tmp_path), options)


def test_an_unwritable_cache_names_the_setting(
    source: Path, options: CacheOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names model.cache_dir, whether the folder cannot be made or not be written."""
    options.cache_dir.parent.joinpath("file").write_text("")
    blocked = CacheOptions(cache_dir=options.cache_dir.parent / "file" / "cache", hub_cache=options.hub_cache)
    with pytest.raises(ConfigError, match=r"model.cache_dir: .* cannot be created"):
        _resolve(str(source), blocked)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"model.cache_dir: .* is not writable"):
        _resolve(str(source), options)


def test_a_cached_pack_is_served_from_a_read_only_cache(
    source: Path, options: CacheOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a conversion needs to write."""
    made = _resolve(str(source), options)
    monkeypatch.setattr(cache, "_require_writable", lambda _: pytest.fail("the cache was to be written"))
    assert _resolve(str(source), options).path == made.path


def test_two_processes_that_start_at_once_make_one_pack(source: Path, options: CacheOptions) -> None:
    """The second waits for the first and takes its pack."""
    results: list[Resolved] = []
    threads = [threading.Thread(target=lambda: results.append(_resolve(str(source), options))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.path for result in results}) == 1
    assert sum(result.converted for result in results) == 1
    assert [path.name for path in options.cache_dir.iterdir()] == [results[0].path.name]


def test_rules_of_precision_are_part_of_the_key(tmp_path: Path, options: CacheOptions) -> None:
    """Equal rules, however they are written, give one pack; others another, in their formats; a pack takes none."""
    source = write_checkpoint(WIDE[0], tmp_path / "src")
    texts = (None, "experts=int4-g32, dense=int8", "dense = INT8,experts=int4-g32", "experts=int8")
    found = [_resolve(str(source), msgspec.structs.replace(options, precision=text)) for text in texts]
    assert [each.converted for each in found] == [True, True, False, True]
    assert found[1].path == found[2].path
    small = open_pack(found[1].path).manifest
    assert {section.precision for file in small.files for section in file.sections} == {"fp32", "fp16", "int4", "int8"}
    wrong = msgspec.structs.replace(options, precision="experts=int4")
    with pytest.raises(ConfigError, match=r"model.precision: 'experts=int4-g64' given, but .* is a pack"):
        _resolve(str(found[0].path), wrong)
    with pytest.raises(ConfigError, match=r"model.precision: 'int5': "):
        _resolve(str(source), msgspec.structs.replace(options, precision="int5"))
