"""Facts read from GGUF files, damaged ones, and the rule of which draft fits which target."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specproxy.adapters.gguf_facts import ModelFacts, check_pair, digest_file, read_facts
from specproxy.adapters.gguf_reader import GgufFile
from specproxy.errors import ModelFileError, PairError
from tests.support.calibrated import CalibratedPair, Region, write_pair

REGIONS = (Region("a", 20, mtp=0.5, draft=0.5), Region("b", 20, mtp=0.5, draft=0.5))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("facts"), layers=3, regions=REGIONS, ctx=2048)


def write(
    path: Path,
    arch: str = "llama",
    *,
    tokens: list[str] | None = None,
    tensors: tuple[str, ...] = (),
    **keys: object,
) -> Path:
    """A tiny file with these keys (``__`` stands for the dot), and one tensor besides `tensors`."""
    w = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        key = name.replace("__", ".")
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        elif isinstance(value, list):
            w.add_array(key, value)
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens or [f"t{i}" for i in range(40)])
    for name in ("blk.0.attn_norm.weight", *tensors):
        w.add_tensor(name, np.ones(64, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


# --- what is read --------------------------------------------------------------------------------


def test_facts_of_a_target_with_mtp(pair: CalibratedPair) -> None:
    facts = read_facts(pair.target)
    assert (facts.architecture, facts.name, facts.quantisation) == ("glm4moe", "calibrated glm4moe", "F16")
    assert (facts.context_length, facts.block_count, facts.embd, facts.heads) == (2048, 4, 128, 2)
    assert (facts.tokenizer, facts.vocab_size) == ("llama", len(pair.vocabulary))
    assert (facts.bos, facts.eos, facts.add_bos, facts.add_eos) == (1, 2, True, False)
    assert (facts.mtp_layers, facts.has_mtp, facts.standalone) == (1, True, True)
    assert not facts.is_moe  # the experts are in the MTP block alone
    assert facts.kv_bytes_per_token == 4 * (64 + 64) * 2
    assert facts.size_bytes == pair.target.stat().st_size
    assert 0 < facts.mtp_bytes < facts.weight_bytes < facts.size_bytes
    assert sum(size for _, size in facts.bytes_by_type) == facts.weight_bytes
    assert "messages" in (facts.chat_template or "")


def test_facts_agree_with_the_gguf_package(pair: CalibratedPair) -> None:
    reader = gguf.GGUFReader(pair.target)
    with GgufFile(pair.target) as file:
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert (ours.nbytes, ours.elements, ours.type) == (
                tensor.n_bytes,
                tensor.n_elements,
                tensor.tensor_type.name,
            )
            assert file.data_at + ours.offset == tensor.data_offset
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY:
                assert file.scalars[name] == field.contents()
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert [t.decode() for t in file.strings("tokenizer.ggml.tokens") or []] == tokens


def test_facts_of_a_mixture_of_experts(tmp_path: Path) -> None:
    facts = read_facts(write_pair(tmp_path, layers=2, regions=REGIONS, experts=8, experts_used=2).target)
    assert (facts.is_moe, facts.expert_count, facts.expert_used_count) == (True, 8, 2)
    with GgufFile(facts.path) as file:
        experts = [t for t in file.tensors.values() if t.name.endswith("_exps.weight")]
    last = f"blk.{facts.block_count - 1}."  # the MTP block
    assert {t.name.partition(".ffn")[0] for t in experts} >= {"blk.1", last.removesuffix(".")}
    assert facts.expert_bytes == sum(t.nbytes for t in experts if not t.name.startswith(last)) > 0
    dense = facts.weight_bytes - facts.mtp_bytes - facts.expert_bytes
    assert facts.expert_share == pytest.approx(facts.expert_bytes / 4 / (dense + facts.expert_bytes / 4))


def test_a_dense_model_reads_no_experts(pair: CalibratedPair) -> None:
    """Those of its MTP block do not count."""
    facts = read_facts(pair.target)
    assert (facts.expert_bytes, facts.expert_share) == (0, 0.0)


def test_an_mtp_key_without_its_tensors_is_no_mtp(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path / "m.gguf", "glm4moe", glm4moe__nextn_predict_layers=1))
    assert (facts.mtp_layers, facts.has_mtp) == (0, False)


def test_mtp_layers_without_a_graph_are_no_use(pair: CalibratedPair) -> None:
    assert not dataclasses.replace(read_facts(pair.target), architecture="llama").has_mtp


def test_an_assistant_is_a_sidecar(pair: CalibratedPair) -> None:
    facts = read_facts(pair.target)
    assert facts.sidecar_type is None
    assert dataclasses.replace(facts, architecture="gemma4-assistant").sidecar_type == "draft-mtp"
    assert dataclasses.replace(facts, standalone=False).sidecar_type == "draft-mtp"


def test_kv_cache_of_layers_that_differ(tmp_path: Path) -> None:
    facts = read_facts(
        write(
            tmp_path / "m.gguf",
            llama__block_count=3,
            llama__embedding_length=512,
            llama__attention__head_count=8,
            llama__attention__head_count_kv=[4, 2, 0],
        )
    )
    assert facts.kv_heads == (4, 2, 0)
    assert facts.kv_bytes_per_token == (4 + 2) * (64 + 64) * 2


def test_recurrent_layers_have_a_state_instead(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "block_count": 8, "embedding_length": 1024, "attention__head_count": 8, "attention__head_count_kv": 2,
        "attention__key_length": 256, "attention__value_length": 256, "full_attention_interval": 4,
        "ssm__conv_kernel": 4, "ssm__inner_size": 2048, "ssm__state_size": 128, "ssm__group_count": 8,
    }  # fmt: skip
    facts = read_facts(write(tmp_path / "m.gguf", "qwen35", **{f"qwen35__{k}": v for k, v in keys.items()}))
    assert facts.recurrent
    assert facts.kv_bytes_per_token == 2 * 2 * (256 + 256) * 2  # two layers of full attention
    assert facts.state_bytes == 6 * (2048 * 128 + 3 * (2048 + 2 * 8 * 128)) * 4


def test_split_files_count_together(tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00002.gguf", split__count=2)
    write(tmp_path / "m-00002-of-00002.gguf", split__count=2)
    facts = read_facts(tmp_path / "m-00001-of-00002.gguf")
    assert facts.parameters == 128
    with pytest.raises(ModelFileError, match=r"a part of a split model.*00001-of-00002"):
        read_facts(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFileError, match="no such file"):
        read_facts(tmp_path / "m-00001-of-00002.gguf")


def test_a_large_vocabulary_is_no_matter(tmp_path: Path) -> None:
    """150 thousand tokens and 150 thousand merges, as large models have."""
    tokens = [f"token{i}" for i in range(150_000)]
    path = write(tmp_path / "m.gguf", tokens=tokens, tokenizer__ggml__merges=tokens)
    begun = time.process_time()
    facts = read_facts(path)
    assert time.process_time() - begun < 1.0
    assert facts.vocab_size == 150_000


# --- the digest ----------------------------------------------------------------------------------


def test_the_digest_sees_content_and_not_the_name(pair: CalibratedPair, tmp_path: Path) -> None:
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(pair.target.read_bytes())
    assert digest_file(copy) == digest_file(pair.target)
    changed = bytearray(copy.read_bytes())
    with GgufFile(copy) as file:
        at = file.data_at
    changed[at] ^= 1  # the first weight
    copy.write_bytes(changed)
    assert digest_file(copy) != digest_file(pair.target)


def test_pairs_of_another_seed_have_another_digest(tmp_path: Path) -> None:
    one = write_pair(tmp_path / "one", regions=REGIONS, seed=1)
    two = write_pair(tmp_path / "two", regions=REGIONS, seed=2)
    assert digest_file(one.target) != digest_file(two.target)


# --- files that are not what they should be ---------------------------------------------------------


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file") as caught:
        read_facts(tmp_path / "none.gguf")
    assert caught.value.hint


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a directory"):
        read_facts(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelFileError, match="it is empty"):
        read_facts(tmp_path / "m.gguf")


def test_another_format(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match=r"not a GGUF file: it begins with b'PK"):
        read_facts(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("version", "message"), [(1, "has GGUF version 1"), (9, "has GGUF version 9"), (3 << 24, "is big-endian")]
)
def test_other_versions(tmp_path: Path, version: int, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelFileError, match=message):
        read_facts(tmp_path / "m.gguf")


def test_a_file_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ModelFileError, match="holds no model"):
        read_facts(tmp_path / "m.gguf")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is no model, but of the type adapter"):
        read_facts(write(tmp_path / "m.gguf", general__type="adapter"))


@given(share=st.floats(0, 0.999))
def test_a_file_cut_anywhere_is_refused(pair: CalibratedPair, tmp_path_factory: object, share: float) -> None:
    content = pair.draft.read_bytes()
    path = pair.draft.with_name("cut.gguf")
    path.write_bytes(content[: int(share * (len(content) - 32))])
    with pytest.raises(ModelFileError):
        read_facts(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 4000), value=st.binary(min_size=1, max_size=8))
def test_damage_is_an_error_of_ours_or_harmless(pair: CalibratedPair, at: int, value: bytes) -> None:
    """Whatever bytes stand in the header: facts or a ModelFileError, nothing else, and no endless reading."""
    content = bytearray(pair.draft.read_bytes())
    content[at : at + len(value)] = value
    path = pair.draft.with_name("damaged.gguf")
    path.write_bytes(content)
    with contextlib.suppress(ModelFileError):
        assert isinstance(read_facts(path), ModelFacts)


@given(st.binary(max_size=300))
def test_random_fields_are_an_error_of_ours(pair: CalibratedPair, noise: bytes) -> None:
    path = pair.draft.with_name("noise.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + noise)
    with pytest.raises(ModelFileError):
        read_facts(path)


def test_arrays_in_arrays_have_an_end(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 100
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + nested)
    with pytest.raises(ModelFileError, match="value type 9"):
        read_facts(tmp_path / "m.gguf")


# --- pairs ---------------------------------------------------------------------------------------


def test_a_pair_that_fits(pair: CalibratedPair) -> None:
    target, draft = read_facts(pair.target), read_facts(pair.draft)
    assert [w for w in check_pair(target, draft) if "size" not in w] == []
    small = dataclasses.replace(draft, weight_bytes=target.weight_bytes // 10)
    assert check_pair(target, small) == ()


def test_a_large_draft_is_warned_of(pair: CalibratedPair) -> None:
    target = read_facts(pair.target)
    draft = dataclasses.replace(read_facts(pair.draft), weight_bytes=target.weight_bytes * 6 // 10)
    assert "60% of its target's size" in check_pair(target, draft)[0]


def test_a_model_does_not_draft_for_itself(pair: CalibratedPair) -> None:
    facts = read_facts(pair.target)
    with pytest.raises(PairError, match="the target itself"):
        check_pair(facts, facts)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer": "gpt2"}, "vocabulary types differ (BPE against SPM)"),
        ({"eos": 7}, "EOS ids differ (7 against 2)"),
        ({"bos": 7}, "BOS ids"),
        ({"add_bos": False}, "add_bos flags"),
        ({"add_eos": True}, "add_eos flags"),
    ],
)
def test_vocabularies_that_differ(pair: CalibratedPair, change: dict[str, object], what: str) -> None:
    target, draft = read_facts(pair.target), read_facts(pair.draft)
    with pytest.raises(PairError) as caught:
        check_pair(target, dataclasses.replace(draft, **change))  # type: ignore[arg-type]  # fields of ModelFacts
    assert what in caught.value.message
    assert "same family" in caught.value.hint


def test_defaults_stand_for_what_is_not_said(pair: CalibratedPair) -> None:
    target, draft = read_facts(pair.target), read_facts(pair.draft)
    silent = dataclasses.replace(draft, bos=None, eos=None, add_bos=None, add_eos=None)
    check_pair(target, silent)


def vocabulary(size: int, changed: int | None = None) -> list[str]:
    return [f"w{i}" if i != changed else "other" for i in range(size)]


def facts_of(path: Path, tokens: list[str]) -> ModelFacts:
    return read_facts(write(path, tokens=tokens, llama__block_count=len(tokens)))


@given(gap=st.integers(-140, 140), changed=st.one_of(st.none(), st.integers(0, 199)))
@settings(max_examples=40)
def test_the_rule_of_sizes_and_texts(pair: CalibratedPair, gap: int, changed: int | None) -> None:
    """At most 128 tokens more or fewer, and the same text from token 5 to the end of the shorter one."""
    folder = pair.draft.parent
    target = facts_of(folder / "t.gguf", vocabulary(200))
    draft = facts_of(folder / "d.gguf", vocabulary(200 + gap, changed))
    draft = dataclasses.replace(draft, digest="another")
    fits = abs(gap) <= 128 and (changed is None or changed < 5 or changed >= 200 + gap)
    if fits:
        check_pair(target, draft)
    else:
        with pytest.raises(PairError, match=r"vocabulary sizes|tokens \d+"):
            check_pair(target, draft)
