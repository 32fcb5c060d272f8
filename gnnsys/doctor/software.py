"""Versions, the native core and devices: what is installed, and whether it fits together."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.doctor.diagnosis import ADVICE, FAILS, Diagnosis

OLDEST_PYTHON = "3.10"
OLDEST = {  # as in pyproject.toml
    "torch": "2.10",
    "numpy": "1.26",
    "pyzmq": "25",
    "cryptography": "47",
    "pymetis": "2023.1",
    "pyyaml": "6",
}
WHY_NEEDED = {
    "torch": "everything is built on it",
    "numpy": "part files are NumPy's",
    "pyzmq": "messages between machines go through it",
    "cryptography": "rows are sealed by it between machines",
    "pymetis": "gnnsys partition cuts graphs by METIS",
    "pyyaml": "cluster files and suites are YAML",
}
NEEDED_BY_SOME = ("pyyaml",)  # without it, JSON and plain text still work
_VECTORS = (("avx512", "avx512f"), ("avx2", "avx2"))  # the widest first: our name, the processor's flag
_CUDART = re.compile(rb"libcudart[^\0]{0,16}\.so\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """What is installed. A version is None where there is none; `core_error` and others say why something is not there.

    `peers`: by name, a version, or the reason why it cannot be imported. `kernels_cuda`: the major version of CUDA that
    our kernels were linked with. `driver_gpus`: GPUs that the kernel's driver has, whatever torch sees.
    """

    python: str
    gnnsys: str
    versions: Mapping[str, str | None]
    peers: Mapping[str, str] = field(default_factory=dict)
    has_curve: bool = True
    torch_error: str | None = None
    core: str | None = None
    core_error: str | None = None
    simd: str | None = None
    simd_wanted: str | None = None
    processor_flags: frozenset[str] = frozenset()
    torch_cuda: str | None = None
    devices: tuple[str, ...] = ()
    driver_gpus: int = 0
    visible_devices: str | None = None
    has_kernels: bool = False
    why_no_kernels: str = ""
    kernels_cuda: str | None = None


def read_software(host: Mapping[str, Any]) -> SoftwareFacts:
    """Looks at what this Python can import. Nothing that is missing or broken raises.

    `host`: what `gnnsys.launch.host_facts` says of this machine.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "gnnsys": host["versions"]["gnnsys"],
        "versions": {name: _version(name) for name in OLDEST},
        "has_curve": _has_curve(),
        "simd_wanted": os.environ.get("GNNSYS_SIMD"),
        "processor_flags": _processor_flags(),
        "driver_gpus": host["gpus"],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    try:
        import torch
    except Exception as error:  # a broken installation fails in any way it likes
        return SoftwareFacts(**facts, torch_error=_reason(error))
    facts |= {"torch_cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts |= {"devices": tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))}
    try:
        from gnnsys import ops
    except ImportError as error:
        return SoftwareFacts(**facts, core_error=_reason(error))
    from gnnsys.bench import peers

    found = {name: peers.version(name) or str(peers.find(name)) for name in peers.PEERS}
    package = Path(ops.__file__).parents[1]
    facts |= {
        "core": next((str(file) for file in sorted(package.glob("_C.*"))), "in another folder"),
        "simd": ops.SIMD_LEVEL,
        "peers": {name: said for name, said in found.items() if name not in OLDEST},
        "has_kernels": ops.HAS_CUDA_KERNELS,
        "why_no_kernels": ops.WHY_NO_KERNELS,
        "kernels_cuda": next((linked_cuda(file.read_bytes()) for file in sorted(package.glob("_cuda.*so"))), None),
    }
    return SoftwareFacts(**facts)


def linked_cuda(library: bytes) -> str | None:
    """The major version of CUDA's runtime that a library asks the loader for."""
    found = _CUDART.search(library)
    return None if found is None else found[1].decode()


def judge_software(facts: SoftwareFacts) -> list[Diagnosis]:
    return [
        *judge_versions_here(facts),
        *judge_peers(facts.peers),
        judge_core(facts),
        judge_devices(facts),
    ]


def judge_versions_here(facts: SoftwareFacts) -> list[Diagnosis]:
    """Everything that gnnsys depends on, against the oldest version that it works with."""
    found = [Diagnosis("gnnsys", facts.gnnsys)]
    if is_older(facts.python, OLDEST_PYTHON):
        remedy = f"install Python {OLDEST_PYTHON} or later"
        found.append(Diagnosis("python", facts.python, "gnnsys uses newer syntax", remedy, FAILS))
    else:
        found.append(Diagnosis("python", facts.python))
    for name, oldest in OLDEST.items():
        version, why, remedy = facts.versions[name], WHY_NEEDED[name], f"pip install '{name}>={oldest}'"
        state = ADVICE if name in NEEDED_BY_SOME else FAILS
        if version is None:
            found.append(Diagnosis(name, "not installed", why, remedy, state))
        elif is_older(version, oldest):
            found.append(Diagnosis(name, f"{version} is older than {oldest}", why, remedy, state))
        elif name == "torch" and facts.torch_error is not None:
            said = f"{version} does not import: {facts.torch_error}"
            found.append(Diagnosis(name, said, why, "pip install --force-reinstall torch", FAILS))
        elif name == "pyzmq" and not facts.has_curve:
            said, why = f"{version}, without CURVE", "machines cannot prove the job's key to each other"
            found.append(Diagnosis(name, said, why, "pip install --force-reinstall --only-binary :all: pyzmq", FAILS))
        else:
            found.append(Diagnosis(name, version))
    return found


def judge_peers(peers: Mapping[str, str]) -> list[Diagnosis]:
    """Libraries that gnnsys works beside. None of them is needed; one that is broken is worth a word."""
    found = []
    for name, said in peers.items():
        if "does not import" in said:
            remedy = f"install the {name} that was built for this torch, or remove it"
            found.append(Diagnosis(name, said, f"code that imports {name} fails", remedy, ADVICE))
        else:
            found.append(Diagnosis(name, said if said[0].isdigit() else "not installed (not needed)"))
    return found


def judge_core(facts: SoftwareFacts) -> Diagnosis:
    """The native library, and the vectors that its loops over rows use."""
    subject = "native core"
    why = "no sampling and no layer works without"
    if facts.torch_error is not None:
        return Diagnosis(subject, "not looked at, for want of torch", why, "install torch first", FAILS)
    if facts.core is None:
        return Diagnosis(subject, facts.core_error or "missing", why, "pip install . in the repository", FAILS)
    widest = next((name for name, flag in _VECTORS if flag in facts.processor_flags), facts.simd)
    if facts.simd_wanted and facts.simd != widest:
        said = f"{facts.core} uses {facts.simd} of a processor with {widest}"
        why = f"GNNSYS_SIMD is {facts.simd_wanted}, and narrow vectors sum rows more slowly"
        return Diagnosis(subject, said, why, "unset GNNSYS_SIMD", ADVICE)
    return Diagnosis(subject, f"{facts.core} ({facts.simd})")


def judge_devices(facts: SoftwareFacts) -> Diagnosis:
    """GPUs: what the driver has, what torch sees, and whether our kernels fit torch's CUDA."""
    subject = "devices"
    if facts.torch_cuda is None and facts.driver_gpus:
        said, why = f"{facts.driver_gpus} GPUs, and a torch without CUDA", "training runs on the processor"
        return Diagnosis(subject, said, why, "install a torch with CUDA (pytorch.org), then gnnsys again", ADVICE)
    if not facts.devices and facts.driver_gpus:
        said, why = f"torch sees none of {facts.driver_gpus} GPUs", "training runs on the processor"
        if facts.visible_devices is not None:
            return Diagnosis(subject, said, f"{why}, for CUDA_VISIBLE_DEVICES is {facts.visible_devices!r}",
                             "unset CUDA_VISIBLE_DEVICES", ADVICE)  # fmt: skip
        return Diagnosis(subject, said, why, f"install a driver for CUDA {facts.torch_cuda}: see nvidia-smi", ADVICE)
    if not facts.devices:
        return Diagnosis(subject, "no GPU: everything runs on the processor")
    names = ", ".join(sorted({f"{facts.devices.count(name)} x {name}" for name in facts.devices}))
    if not facts.has_kernels:
        why = "batches are sampled on the host, and device='cuda' is refused by our ops"
        said = f"{names}, without our kernels ({facts.why_no_kernels})"
        return Diagnosis(
            subject, said, why, "GNNSYS_CUDA=1 pip install --no-build-isolation . in the repository", ADVICE
        )
    torch_major = (facts.torch_cuda or "").split(".")[0]
    if facts.kernels_cuda is not None and facts.kernels_cuda != torch_major:
        said = f"{names}; our kernels are of CUDA {facts.kernels_cuda}, torch is of {facts.torch_cuda}"
        why = "two CUDA runtimes in one process do not share streams and memory"
        remedy = f"set CUDA_HOME to CUDA {torch_major} and pip install --no-build-isolation . in the repository"
        return Diagnosis(subject, said, why, remedy, FAILS)
    return Diagnosis(subject, f"{names} (CUDA {facts.torch_cuda}, our kernels are there)")


def is_older(version: str, oldest: str) -> bool:
    """Whether a version comes before another, by its leading numbers.

    >>> is_older("2.9.1+cpu", "2.10"), is_older("2.10.0a1", "2.10"), is_older("47", "47.0")
    (True, False, False)
    """

    def numbers(text: str) -> list[int]:
        found = [re.match(r"\d+", word) for word in text.split("+")[0].split(".")]
        return [int(each[0]) for each in found if each]

    ours, theirs = numbers(version), numbers(oldest)
    size = max(len(ours), len(theirs))
    return ours + [0] * (size - len(ours)) < theirs + [0] * (size - len(theirs))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_curve() -> bool:
    try:
        import zmq
    except ImportError:
        return False
    return bool(zmq.has("curve"))


def _processor_flags() -> frozenset[str]:
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(found[1].split()) if found else frozenset()


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
