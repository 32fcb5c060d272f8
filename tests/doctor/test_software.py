"""Versions, native core and devices of other machines, told as facts: each gives its line and state."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.doctor import ADVICE, FAILS, OK, Diagnosis
from gnnsys.doctor.software import (
    OLDEST,
    OLDEST_PYTHON,
    WHY_NEEDED,
    SoftwareFacts,
    is_older,
    judge_software,
    linked_cuda,
)

VERSIONS: dict[str, str | None] = {
    "torch": "2.11.0+cu129",
    "numpy": "2.1.0",
    "pyzmq": "26.2",
    "cryptography": "47.0.0",
    "pymetis": "2025.1",
    "pyyaml": "6.0.2",
}
WELL = SoftwareFacts(
    python="3.12.4",
    gnnsys="0.1.0",
    versions=VERSIONS,
    peers={"dgl": "2.1.0", "pyg-lib": "pyg-lib is not installed"},
    core="/opt/gnnsys/_C.abi3.so",
    simd="avx512",
    processor_flags=frozenset({"sse2", "avx2", "avx512f"}),
    torch_cuda="12.9",
    devices=("H100", "H100"),
    driver_gpus=2,
    has_kernels=True,
    kernels_cuda="12",
)
NO_GPU = replace(WELL, torch_cuda=None, devices=(), driver_gpus=0, has_kernels=False, kernels_cuda=None)


def wrong(facts: SoftwareFacts) -> list[Diagnosis]:
    return [each for each in judge_software(facts) if each.state != OK]


def without(name: str, version: str | None = None) -> SoftwareFacts:
    return replace(WELL, versions={**VERSIONS, name: version})


def test_a_machine_that_has_everything_has_only_lines_that_say_so():
    assert wrong(WELL) == [] and wrong(NO_GPU) == []
    lines = {each.subject: str(each) for each in judge_software(WELL)}
    assert lines["devices"].endswith("2 x H100 (CUDA 12.9, our kernels are there)")
    assert lines["pyg-lib"].endswith("not installed (not needed)") and lines["dgl"].endswith("2.1.0")
    assert {each.subject for each in judge_software(WELL)} >= {"gnnsys", "python", *OLDEST, "native core"}


@pytest.mark.parametrize(
    ("facts", "state", "said"),
    [
        (replace(WELL, python="3.9.7"), FAILS, "3.9.7: gnnsys uses newer syntax. Remedy: install Python 3.10"),
        (without("cryptography", "46.0.3"), FAILS, "46.0.3 is older than 47: rows are sealed by it"),
        (without("cryptography"), FAILS, "Remedy: pip install 'cryptography>=47'"),
        (without("torch", "2.9.1+cpu"), FAILS, "2.9.1+cpu is older than 2.10"),
        (without("pyyaml"), ADVICE, "Remedy: pip install 'pyyaml>=6'"),
        (replace(WELL, has_curve=False), FAILS, "26.2, without CURVE: machines cannot prove the job's key"),
        (
            replace(WELL, peers={"dgl": "dgl does not import: OSError: libcudart"}),
            ADVICE,
            "code that imports dgl fails",
        ),
        (replace(WELL, core=None, core_error="no native core"), FAILS, "no native core: no sampling"),
        (replace(WELL, simd="sse2", simd_wanted="sse2"), ADVICE, "uses sse2 of a processor with avx512"),
        (replace(NO_GPU, driver_gpus=4), ADVICE, "4 GPUs, and a torch without CUDA"),
        (
            replace(WELL, devices=()),
            ADVICE,
            "torch sees none of 2 GPUs: training runs on the processor. Remedy: install a",
        ),
        (replace(WELL, devices=(), visible_devices=""), ADVICE, "Remedy: unset CUDA_VISIBLE_DEVICES"),
        (replace(WELL, has_kernels=False, why_no_kernels="no nvcc"), ADVICE, "without our kernels (no nvcc)"),
        (replace(WELL, kernels_cuda="13"), FAILS, "our kernels are of CUDA 13, torch is of 12.9"),
    ],
)
def test_each_thing_that_is_wrong_is_one_line_with_its_remedy(facts: SoftwareFacts, state: str, said: str):
    (found,) = wrong(facts)
    assert found.state == state and said in str(found) and found.why


def test_a_torch_that_does_not_import_takes_the_native_core_with_it():
    found = wrong(replace(NO_GPU, torch_error="libc10.so: cannot open", core=None))
    assert [(each.subject, each.state) for each in found] == [("torch", FAILS), ("native core", FAILS)]
    assert "2.11.0+cu129 does not import: libc10.so" in str(found[0])


def test_narrow_vectors_of_a_processor_that_has_no_others_are_well():
    assert wrong(replace(NO_GPU, simd="sse2", processor_flags=frozenset({"sse2"}))) == []
    assert wrong(replace(NO_GPU, simd="neon", simd_wanted="neon", processor_flags=frozenset({"asimd"}))) == []


def test_the_oldest_versions_are_those_of_the_package():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert dict(re.findall(r'"([\w-]+)>=([\d.]+)"', listed)) == OLDEST and set(WHY_NEEDED) == set(OLDEST)
    assert f'requires-python = ">={OLDEST_PYTHON}"' in text


def test_versions_are_compared_by_their_numbers():
    assert is_older("2.9", "2.10") and is_older("1", "1.0.1") and not is_older("2023.1.post1", "2023.1")
    assert not is_older("2.10.0a0+git123", "2.10") and not is_older("47.0", "47")


def test_the_cuda_of_a_library_is_what_it_asks_the_loader_for():
    assert linked_cuda(b"\x7fELF\0libtorch_cuda.so\0libcudart.so.13\0libc.so.6\0") == "13"
    assert linked_cuda(b"\x7fELF\0libcudart-d0da41ae.so.12\0") == "12"
    assert linked_cuda(b"\x7fELF\0libc.so.6\0") is None
