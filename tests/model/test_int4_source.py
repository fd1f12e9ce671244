"""AWQ and GPTQ checkpoints become packs with the same numbers, and predict what their dequantised twins predict."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from int4_checkpoints import CASES, KINDS, Int4, Matrix, write_int4
from random_cases import Case, config_of
from random_checkpoints import tensors_of, write_tensors
from safetensors.numpy import load_file, save_file

from colibrid.errors import ModelError
from colibrid.model import floats
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.convert import convert
from colibrid.model.families import family_of
from colibrid.model.families.base import recipe
from colibrid.model.forward import Forward
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.precision import parse_plan
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def packed(case: Case, kind: Int4, folder: Path) -> tuple[PackModel, dict[str, Matrix]]:
    matrices = write_int4(case, kind, folder / "src")
    convert(folder / "src", folder / "pack", crc32c=zlib.crc32)
    return PackModel(open_pack(folder / "pack")), matrices


def sources(model: PackModel, tensor: Any) -> list[str]:
    names = family_of({"architectures": [model.pack.manifest.family]}).names
    made = recipe(names, model.description.hyperparameters, model.description.layers, tensor, ())
    return [source.name.removesuffix(".weight") for source in made]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_stay_what_they_are(case: Case, kind: Int4, tmp_path: Path) -> None:
    """Every value, scale and zero point of the checkpoint is in the pack; zero points that are all 8 need no place."""
    model, matrices = packed(case, kind, tmp_path)
    seen = set()
    for tensor in model.tensors():
        parts = [matrices[name] for name in sources(model, tensor) if name in matrices]
        assert model.format_of(tensor).quantised == bool(parts), tensor
        if not parts:
            continue
        seen.update(sources(model, tensor))
        assert model.format_of(tensor).name == f"int4-g{kind.group}" + ("" if kind.symmetric else "-z")
        found = model.quantised(tensor)
        assert np.array_equal(found.values, np.concatenate([part.values for part in parts]))
        assert np.array_equal(found.scales, np.concatenate([part.scales for part in parts]))
        if found.zeros is not None:
            assert np.array_equal(found.zeros, np.concatenate([part.zeros for part in parts]))
        weight = np.concatenate([part.weight(kind.group) for part in parts])
        assert np.array_equal(model.matrix(tensor), weight)
    assert seen == set(matrices)


@pytest.mark.parametrize("kind", KINDS[::2], ids=lambda kind: kind.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predictions_are_those_of_the_numbers(case: Case, kind: Int4, tmp_path: Path) -> None:
    """Checkpoint, pack and a float32 checkpoint of the dequantised weights predict the same."""
    model, matrices = packed(case, kind, tmp_path)
    plain = {
        name: floats.widen(floats.narrow(values, case.precision), case.precision)
        for name, values in tensors_of(case, config_of(case)).items()
    }
    plain |= {f"{name}.weight": matrix.weight(kind.group) for name, matrix in matrices.items()}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config_of(case)))
    write_tensors(tmp_path / "plain", plain, "fp32")
    found = []
    for folder in ("src", "plain"):
        with Checkpoint(tmp_path / folder) as checkpoint:
            source = CheckpointModel(checkpoint)
            source.check()
            found.append(predictions(source))
    found.append(predictions(model))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def predictions(weights: Any) -> Any:
    texts = Forward(weights, [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]])
    texts.run()
    return np.concatenate([block for _, block in texts.log_softmax()])


def test_a_bias_of_zeros_is_passed_over_and_another_is_not(tmp_path: Path) -> None:
    """Some writers add a bias of zeros to each int4 layer; one that says something is refused."""
    write_int4(CASES[1], KINDS[0], tmp_path / "src")
    path = tmp_path / "src" / "model-00002-of-00002.safetensors"
    name = "model.layers.0.mlp.experts.0.gate_proj.bias"
    save_file({**load_file(path), name: np.zeros(32, np.float16)}, path)
    index(tmp_path / "src", name)
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32)
    save_file({**load_file(path), name: np.ones(32, np.float16)}, path)
    with pytest.raises(ModelError, match="gate_proj.bias"):
        convert(tmp_path / "src", tmp_path / "other", crc32c=zlib.crc32)


def index(folder: Path, name: str) -> None:
    where = folder / "model.safetensors.index.json"
    found = json.loads(where.read_text())
    found["weight_map"][name] = "model-00002-of-00002.safetensors"
    where.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "awq, gptq"]),
        ({"bits": 8}, ["bits is 8", "only 4"]),
        ({"group_size": -1}, ["group_size is -1", "32, 64, 128"]),
        ({"version": "gemv"}, ["version", "gemv", "gemm"]),
        ({"group_size": 64}, ["expected I32"]),
        ({"bits": "four"}, ["quantization_config", "int"]),
    ],
)
def test_settings_that_are_not_read(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """Each is refused by its name, with what is read."""
    write_int4(CASES[0], KINDS[0], tmp_path / "src")
    where = tmp_path / "src" / "config.json"
    config = json.loads(where.read_text())
    config["quantization_config"].update(change)
    where.write_text(json.dumps(config))
    refused(tmp_path, words)


def test_int4_without_settings(tmp_path: Path) -> None:
    """Older checkpoints keep them in another file: the message says what to copy where."""
    write_int4(CASES[0], KINDS[0], tmp_path / "src")
    where = tmp_path / "src" / "config.json"
    config = json.loads(where.read_text())
    del config["quantization_config"]
    where.write_text(json.dumps(config))
    refused(tmp_path, ["qweight is int4", "quantize_config.json", "quant_method"])


def refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        convert(folder / "src", folder / "pack", crc32c=zlib.crc32)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("g_idx", lambda words: words[::-1], ["g_idx", "desc_act", "quantize"]),
        ("qzeros", lambda words: words | -1, ["stores 15", "gptq_v2"]),
        ("scales", lambda scales: (scales * np.inf).astype(np.float16), ["scales", "float16"]),
        ("scales", lambda scales: scales.astype(np.float32) * np.float32(1.0001), ["scales", "float16"]),
        ("qweight", lambda words: words.astype(np.float32), ["qweight", "F32", "I32"]),
        ("qzeros", None, ["lacks", "qzeros"]),
    ],
)
def test_tensors_that_are_not_read(
    part: str, change: Callable[[Any], Any] | None, words: list[str], tmp_path: Path
) -> None:
    """Inputs out of order, ambiguous zero points, scales that float16 does not have, and what is missing."""
    write_int4(CASES[1], Int4("gptq", g_idx=True), tmp_path / "src")
    path = tmp_path / "src" / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.experts.1.up_proj.{part}"
    if change is None:
        del tensors[name]
        (tmp_path / "src" / "model.safetensors.index.json").unlink()
        (tmp_path / "src" / "model-00001-of-00002.safetensors").rename(tmp_path / "src" / "a.safetensors")
        entries = {
            **dict.fromkeys(tensors, path.name),
            **dict.fromkeys(names_of(tmp_path / "src" / "a.safetensors"), "a.safetensors"),
        }
        (tmp_path / "src" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, path)
    refused(tmp_path, words)


def names_of(path: Path) -> list[str]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return [name for name in json.loads(data[8 : 8 + size]) if name != "__metadata__"]


def test_int4_is_not_rounded_again(tmp_path: Path) -> None:
    """Another quantised format for it is refused; floats are what the numbers stand for, exactly in fp32."""
    matrices = write_int4(CASES[0], KINDS[0], tmp_path / "src")
    with pytest.raises(ModelError, match=r"layer 0 expert 0 gate: .* int4-g32-z, and int8 would round it again"):
        convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32, plan=parse_plan("experts=int8"))
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32, plan=parse_plan("experts=fp32"))
    model = PackModel(open_pack(tmp_path / "pack"))
    tensor = next(tensor for tensor in model.tensors() if tensor.role == "down" and tensor.expert == 1)
    assert np.array_equal(model.matrix(tensor), matrices["model.layers.0.mlp.experts.1.down_proj"].weight(32))
