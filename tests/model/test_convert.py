from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from random_cases import CASES, Case, config_of, prompts_of
from random_checkpoints import tensors_of, write_checkpoint, write_safetensors, write_tensors
from reference import Reference

from colibrid.errors import ModelError
from colibrid.model import floats
from colibrid.model.convert import PackExistsError, convert
from colibrid.model.formats import padded
from colibrid.model.layout import MATRIX_ROLES
from colibrid.model.pack import open_pack

GOLDENS = Path(__file__).parent.parent / "data" / "random"
BASE = CASES[0]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _with_tensors(folder: Path, change: Any, case: Case = BASE) -> Path:
    """A checkpoint whose float32 tensors went through `change`."""
    write_checkpoint(case, folder)
    tensors = tensors_of(case, config_of(case))
    change(tensors)
    write_tensors(folder, tensors, case.precision)
    return folder


@pytest.mark.parametrize("backend", ["cpu", "any"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_converted_checkpoint_computes_what_transformers_computes(
    case: Case, backend: Literal["cpu", "any"], tmp_path: Path
) -> None:
    """The float64 forward pass over the pack agrees with float32 transformers on the checkpoint to 1e-5."""
    convert(write_checkpoint(case, tmp_path / "src"), tmp_path / "pack", crc32c=zlib.crc32, backend=backend)
    reference = Reference(tmp_path / "pack")
    golden = json.loads((GOLDENS / f"{case.name}.json").read_text())
    for prompt, logits in zip(prompts_of(case), golden["logits"], strict=True):
        got = reference.forward(prompt)["logits"]
        assert np.linalg.norm(got - logits) <= 1e-5 * np.linalg.norm(logits)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model code that config.json names, and pickled weights beside the others, are neither imported nor opened."""
    src, ran = write_checkpoint(BASE, tmp_path / "src"), tmp_path / "ran"
    config = json.loads((src / "config.json").read_text())
    trap = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
    for name in ("modeling_trap", "configuration_trap", "sitecustomize", "numpy"):
        (src / f"{name}.py").write_text(trap)
    (src / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(ran) + b"'\ntR.")
    named = {"AutoConfig": "configuration_trap.TrapConfig", "AutoModelForCausalLM": "modeling_trap.TrapForCausalLM"}
    (src / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    monkeypatch.chdir(src)
    convert(src, tmp_path / "pack", crc32c=zlib.crc32, backend="any")
    assert not ran.exists()
    exec(trap)
    assert ran.exists()


def test_checksums_are_those_of_the_bytes(converted: Path) -> None:
    """sha256 is of each whole file, crc32c of each started MiB, by the given function."""
    for file in open_pack(converted / "pack").manifest.files:
        data = (converted / "pack" / file.name).read_bytes()
        assert file.bytes == len(data)
        assert file.sha256 == hashlib.sha256(data).hexdigest()
        blocks = [data[begin : begin + (1 << 20)] for begin in range(0, len(data), 1 << 20)]
        assert file.crc32c == tuple(zlib.crc32(block) for block in blocks)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dtype_rounds_every_matrix_to_nearest(dtype: str, tmp_path: Path) -> None:
    """With --dtype each matrix holds the rounded values of the checkpoint, the small tensors its own."""
    src = write_checkpoint(BASE, tmp_path / "src")
    manifest = convert(src, tmp_path / "pack", dtype, crc32c=zlib.crc32, backend="any")  # type: ignore[arg-type]
    assert manifest.precision == dtype
    original = tensors_of(BASE, config_of(BASE))
    for file in manifest.files:
        data = (tmp_path / "pack" / file.name).read_bytes()
        for section in file.sections:
            part = np.frombuffer(
                data[section.offset : section.offset + section.bytes], floats.STORAGE[section.precision]
            )
            if section.role == "embedding":
                expected = floats.narrow(original["model.embed_tokens.weight"], dtype)  # type: ignore[arg-type]
                np.testing.assert_array_equal(part, expected.reshape(-1))
            if section.role == "router":
                np.testing.assert_array_equal(
                    part, original[f"model.layers.{section.layer}.mlp.gate.weight"].reshape(-1)
                )


def test_a_pack_for_the_cpu_is_rows16(tmp_path: Path) -> None:
    """By default the pack is for the CPU: matrices rows16, vectors flat, the padding zero."""
    case = next(case for case in CASES if case.name == "qwen-odd-sizes")
    manifest = convert(write_checkpoint(case, tmp_path / "src"), tmp_path / "pack", crc32c=zlib.crc32)
    assert manifest.backend == "cpu"
    for file in manifest.files:
        data = (tmp_path / "pack" / file.name).read_bytes()
        for section in file.sections:
            matrix = section.role in MATRIX_ROLES
            assert section.layout == ("rows16" if matrix else "flat")
            if matrix and section.shape[0] % 16:
                rows, cols = padded(section.shape, "rows16", section.precision)
                assert section.padded_shape == (rows, cols)
                kind = floats.STORAGE[section.precision]
                values = np.frombuffer(data, kind, rows * cols, section.offset).reshape(-1, cols, 16)
                assert values[-1, :, : section.shape[0] % 16].any()
                assert not values[-1, :, section.shape[0] % 16 :].any()


def test_a_pack_for_cuda_is_mma(tmp_path: Path) -> None:
    """Element by element, every matrix lies where the lanes of an mma instruction want it, the padding zero."""
    case = next(case for case in CASES if case.name == "qwen-odd-sizes")
    src = write_checkpoint(case, tmp_path / "src")
    manifest = convert(src, tmp_path / "cuda", "fp16", crc32c=zlib.crc32, backend="cuda")
    flat = convert(src, tmp_path / "any", "fp16", crc32c=zlib.crc32, backend="any")
    assert manifest.backend == "cuda"
    for file, plain in zip(manifest.files, flat.files, strict=True):
        data, expected = ((tmp_path / name / file.name).read_bytes() for name in ("cuda", "any"))
        for section, source in zip(file.sections, plain.sections, strict=True):
            values = np.frombuffer(expected, floats.STORAGE[source.precision], offset=source.offset)
            matrix = values[: source.shape[0] * source.shape[1]].reshape(source.shape)
            if section.layout == "flat":
                assert data[section.offset :][: section.bytes] == matrix.tobytes()
                continue
            matrix = matrix.T if section.role == "down" else matrix
            rows, cols = padded(section.shape, "mma", section.precision)
            wanted = np.zeros((rows, cols), np.uint16)
            wanted[: matrix.shape[0], : matrix.shape[1]] = matrix.view(np.uint16)
            tiles = np.frombuffer(data, np.uint16, rows * cols, section.offset).reshape(rows // 16, cols // 16, 32, 8)
            for lane, element in itertools.product(range(32), range(8)):
                row = lane // 4 + element // 2 % 2 * 8
                col = lane % 4 * 2 + element % 2 + element // 4 * 8
                np.testing.assert_array_equal(tiles[:, :, lane, element], wanted[row::16, col::16])


def test_a_pack_for_cuda_has_16_bit_weights(tmp_path: Path) -> None:
    """An fp32 pack for CUDA is refused, with the options that help."""
    with pytest.raises(ModelError, match="16-bit weights; convert with --dtype bf16 or fp16"):
        convert(write_checkpoint(BASE, tmp_path / "src"), tmp_path / "p", "fp32", crc32c=zlib.crc32, backend="cuda")


def test_auto_keeps_the_checkpoints_precision(tmp_path: Path) -> None:
    """`auto` is the type of most of the checkpoint's bytes."""
    case = next(case for case in CASES if case.precision == "bf16")
    assert convert(write_checkpoint(case, tmp_path / "src"), tmp_path / "p", crc32c=zlib.crc32).precision == "bf16"


def test_per_expert_and_fused_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    """Both spellings of the experts make the same pack."""
    _with_tensors(tmp_path / "single", lambda _: None)
    _with_tensors(tmp_path / "fused", _fuse)
    for name in ("single", "fused"):
        convert(tmp_path / name, tmp_path / f"{name}.pack", crc32c=zlib.crc32, name="same")
    for name in _names(tmp_path / "single.pack"):
        assert (tmp_path / "single.pack" / name).read_bytes() == (tmp_path / "fused.pack" / name).read_bytes()


def _fuse(tensors: dict[str, floats.Array]) -> None:
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        parts = [
            {name: tensors.pop(f"{block}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")}
            for expert in range(4)
        ]
        tensors[f"{block}.gate_up_proj"] = np.stack([np.concatenate([p["gate"], p["up"]]) for p in parts])
        tensors[f"{block}.down_proj"] = np.stack([p["down"] for p in parts])


def test_large_matrices_are_read_in_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes do not depend on how many rows are read at once."""
    src = write_checkpoint(BASE, tmp_path / "src")
    convert(src, tmp_path / "whole", "bf16", crc32c=zlib.crc32, name="same")
    monkeypatch.setattr("colibrid.model.source.BLOCK_BYTES", 300)
    convert(src, tmp_path / "blocks", "bf16", crc32c=zlib.crc32, name="same")
    for name in _names(tmp_path / "whole"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "blocks" / name).read_bytes()


def test_texts_and_end_ids_come_along(source: Path, tmp_path: Path) -> None:
    """Text files are copied unchanged, and the description names them and the end ids."""
    texts = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ x }}"}
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    manifest = convert(source, tmp_path / "p", crc32c=zlib.crc32)
    assert manifest.text.eos_token_ids == (3, 4)
    assert manifest.text.chat_template == "chat_template.jinja"
    assert all((tmp_path / "p" / name).read_text() == text for name, text in texts.items())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress never falls and ends with all bytes done."""
    calls: list[tuple[int, int, str]] = []
    src = write_checkpoint(BASE, tmp_path / "src")
    manifest = convert(src, tmp_path / "p", "auto", lambda *call: calls.append(call), crc32c=zlib.crc32)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[-1][:2] == (sum(file.bytes for file in manifest.files),) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            "lacks tensor model.layers.1.mlp.experts.2.up",
        ),
        (lambda t: t.update({"model.layers.2.x": np.zeros(3, np.float32)}), "has tensor model.layers.2.x that"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
            r"model.norm.weight has shape \[31\], config.json asks for \[32\]",
        ),
        (lambda t: t["model.layers.0.mlp.gate.weight"].fill(np.nan), "model.layers.0.mlp.gate.weight has values that"),
        (lambda t: t["model.embed_tokens.weight"].__setitem__((3, 4), np.inf), "model.embed_tokens.weight has values"),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + np.float32(1)}),
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
    ],
    ids=["missing", "extra", "shape", "nan", "infinite", "untied"],
)
def test_a_wrong_tensor_is_named(change: Any, message: str, tmp_path: Path) -> None:
    """Missing, extra, mis-shaped and non-finite tensors are named, and no pack appears."""
    src = _with_tensors(tmp_path / "src", change)
    with pytest.raises(ModelError, match=message):
        convert(src, tmp_path / "p", crc32c=zlib.crc32)
    assert not (tmp_path / "p").exists()


def test_names_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    """A checkpoint with a missing tensor leaves no partial folder."""
    src = _with_tensors(tmp_path / "src", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ModelError, match="lacks tensor"):
        convert(src, tmp_path / "p", crc32c=zlib.crc32)
    assert _names(tmp_path) == {"src"}


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    """A copy of a tied head and old RoPE buffers are in many checkpoints and say nothing new."""

    def add(tensors: dict[str, floats.Array]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    manifest = convert(_with_tensors(tmp_path / "src", add), tmp_path / "p", crc32c=zlib.crc32)
    assert "head" not in {section.role for section in manifest.files[0].sections}


def test_values_too_large_for_fp16_are_named(tmp_path: Path) -> None:
    """Rounding to a smaller type must not make infinities."""
    src = _with_tensors(tmp_path / "src", lambda t: t["model.embed_tokens.weight"].__setitem__((0, 0), 1e6))
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight has values too large for fp16"):
        convert(src, tmp_path / "p", "fp16", crc32c=zlib.crc32)


def test_an_unsupported_type_is_named(source: Path, tmp_path: Path) -> None:
    """Quantised checkpoints are refused by tensor and type."""
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ModelError, match="has type I32; supported: F32, F16, BF16"):
        convert(source, tmp_path / "p", crc32c=zlib.crc32)


def test_an_existing_pack_is_never_touched(converted: Path, tmp_path: Path) -> None:
    """Converting onto an existing name is refused, and what is there stays."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "mine").write_text("x")
    with pytest.raises(PackExistsError, match="exists already"):
        convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32)
    assert _names(tmp_path / "p") == {"mine"}


class _StopError(Exception):
    pass


def _interrupt_after(files: int) -> Any:
    calls = 0

    def progress(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == files:
            raise _StopError

    return progress


def test_an_interrupted_conversion_is_resumed(converted: Path, tmp_path: Path) -> None:
    """The final name never holds a half pack; the second run keeps finished files and the result is the same."""
    with pytest.raises(_StopError):
        convert(converted / "src", tmp_path / "p", "auto", _interrupt_after(4), crc32c=zlib.crc32)
    assert not (tmp_path / "p").exists()
    kept = {path.name: path.stat().st_ino for path in (tmp_path / "p.partial").glob("*.bin")}
    assert len(kept) == 4
    made: list[str] = []
    convert(converted / "src", tmp_path / "p", "auto", lambda *call: made.append(call[2]), crc32c=zlib.crc32)
    assert not set(made) & set(kept)
    assert _names(tmp_path) == {"p"}
    assert _names(tmp_path / "p") == _names(converted / "pack")
    for name in _names(tmp_path / "p"):
        assert (tmp_path / "p" / name).read_bytes() == (converted / "pack" / name).read_bytes()


def test_a_damaged_finished_file_is_made_again(converted: Path, tmp_path: Path) -> None:
    """On resuming, a file whose bytes do not match its journal line is not kept, nor are strangers."""
    with pytest.raises(_StopError):
        convert(converted / "src", tmp_path / "p", "auto", _interrupt_after(4), crc32c=zlib.crc32)
    partial = tmp_path / "p.partial"
    data = bytearray((partial / "dense.bin").read_bytes())
    data[100] ^= 1
    (partial / "dense.bin").write_bytes(data)
    (partial / "stranger.so").write_text("x")
    with (partial / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"fingerprint":"torn')
    convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32)
    assert _names(tmp_path / "p") == _names(converted / "pack")
    assert (tmp_path / "p" / "dense.bin").read_bytes() == (converted / "pack" / "dense.bin").read_bytes()


def test_another_precision_does_not_resume(converted: Path, tmp_path: Path) -> None:
    """Files of a conversion to another precision are not taken over."""
    with pytest.raises(_StopError):
        convert(converted / "src", tmp_path / "p", "fp32", _interrupt_after(4), crc32c=zlib.crc32)
    manifest = convert(converted / "src", tmp_path / "p", "bf16", crc32c=zlib.crc32)
    assert open_pack(tmp_path / "p").manifest == manifest
    assert manifest.precision == "bf16"


def test_a_full_disk_is_noticed_before_writing(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little space is an error with both numbers, and no weights are written."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"needs [\d,]+ more bytes but 1,000 are free"):
        convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32)
    assert not list((tmp_path / "p.partial").glob("*.bin"))


def test_a_disk_that_fills_up_leaves_no_pack(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk while writing is reported with the way on, and the final name stays free."""

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelError, match="No space left on device; make room there, .* run the same command again"):
        convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32)
    assert not (tmp_path / "p").exists()


def test_two_writers_do_not_meet(converted: Path, tmp_path: Path) -> None:
    """While one conversion runs, a second to the same place is refused; one that waits finds the pack made."""

    def second(*_: object) -> None:
        with pytest.raises(ModelError, match="another conversion is writing it"):
            convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32)

    convert(converted / "src", tmp_path / "p", "auto", second, crc32c=zlib.crc32)
    with pytest.raises(PackExistsError):
        convert(converted / "src", tmp_path / "p", crc32c=zlib.crc32, wait=True)


def test_a_missing_destination_folder_is_an_error(converted: Path, tmp_path: Path) -> None:
    """The parent of DST must exist."""
    with pytest.raises(ModelError, match="cannot be created"):
        convert(converted / "src", tmp_path / "none" / "p", crc32c=zlib.crc32)


def test_mixed_types_within_a_checkpoint_are_converted(tmp_path: Path) -> None:
    """Each tensor is read by its own type, whatever the others have."""
    src = write_checkpoint(BASE, tmp_path / "src")
    tensors = tensors_of(BASE, config_of(BASE))
    norms = {name: values for name, values in tensors.items() if "norm" in name}
    write_safetensors(src / "a.safetensors", norms, "fp32")
    write_safetensors(src / "b.safetensors", {k: v for k, v in tensors.items() if k not in norms}, "bf16")
    (src / "model.safetensors").unlink()
    weight_map = {name: "a.safetensors" if name in norms else "b.safetensors" for name in tensors}
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    manifest = convert(src, tmp_path / "p", crc32c=zlib.crc32)
    assert manifest.precision == "bf16"
    norm = Reference(tmp_path / "p").weight("final_norm")
    np.testing.assert_array_equal(norm[0].astype(np.float32), tensors["model.norm.weight"])
