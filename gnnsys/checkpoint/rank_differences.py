"""States that should be the same on every rank, and the entries that are not. Ranks compare digests at every save.

Rank 0's states are saved for all ranks. A rank with other values (running statistics of a batch norm, a user's buffers)
saves those entries too, so that a resumed job gives every rank its own. Parameters inside DDP must not differ: DDP
assumes that they are equal and never checks again, so such a job trains wrongly, and `check_parameters` refuses it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1 << 16  # bytes that are hashed as they are
_WORDS = 64  # a line is this many words of 8 bytes; each column has a sum of its own
_LINES = 1 << 12  # lines that are added up at a time: 2 MB, which fit a cache
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # as in splitmix64

Digests = dict[str, dict[str, str]]  # state -> entry -> digest


def digest_states(states: Mapping[str, Any]) -> Digests:
    """A digest of each entry of each state. Equal digests mean equal bits."""
    parts = {
        (name, key): list(_parts(value)) for name, state in states.items() for key, value in _entries(state).items()
    }
    sums = [part for each in parts.values() for part in each if isinstance(part, Tensor)]
    taken = iter(_to_host(sums))
    found: Digests = {name: {} for name in states}
    for (name, key), each in parts.items():
        text = hashlib.blake2b(digest_size=8)
        for part in each:
            content = part if isinstance(part, bytes) else next(taken).numpy().tobytes()
            text.update(len(content).to_bytes(8, "little") + content)
        found[name][key] = text.hexdigest()
    return found


def summary(digests: Digests) -> dict[str, str]:
    """One digest per state. Ranks exchange these first, and digests of entries only where these differ."""
    return {
        name: hashlib.blake2b(repr(sorted(each.items())).encode(), digest_size=8).hexdigest()
        for name, each in digests.items()
    }


def differing(states: Mapping[str, Any], mine: Digests, first: Digests) -> dict[str, dict[str, Any]]:
    """The states in which this rank differs from rank 0, whose digests are `first`, in the form that `merged` takes."""
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in first.items():
        keys = [key for key, digest in mine[name].items() if theirs.get(key) != digest]
        if mine[name].keys() != theirs.keys() or (keys and _entries(states[name]) is not states[name]):
            found[name] = {"whole": states[name]}
        elif keys:
            found[name] = {"entries": {key: states[name][key] for key in keys}}
    return found


def keys_of(own: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """For the manifest: the entries of each state in which a rank differs. An empty list means the whole state."""
    return {name: sorted(each.get("entries", ())) for name, each in own.items()}


def differing_file(rank: int) -> str:
    """The file in which a rank saves what differs from rank 0."""
    return f"differing-{rank}.pt"


def merged(state: Any, own: Mapping[str, Any] | None) -> Any:
    """Rank 0's state with the entries of `own` in place of its own. Changes `state`."""
    if own is None:
        return state
    if "whole" in own:
        return own["whole"]
    state.update(own["entries"])
    return state


def check_parameters(name: str, value: Any, own: Mapping[str, Any], rank: int) -> None:
    """ValueError where parameters inside DDP differ from those of rank 0."""
    if not isinstance(value, nn.parallel.DistributedDataParallel):
        return
    ignored = getattr(value, "parameters_to_ignore", ())
    kept = {
        key
        for key, parameter in value.module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and key not in ignored
    }
    apart = [key for key in own.get("entries", ()) if key in kept]
    if apart:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        raise ValueError(
            f"{name}: {apart[0]}{more} of rank {rank} is not what rank 0 has, though DDP takes parameters to be the "
            "same on every rank: they have gone apart, as they do where one rank skips a step or changes weights by "
            f"itself. Broadcast them from rank 0; or, where that is meant, give resume() {name}.module, of which "
            "each rank's are saved"
        )


def _entries(state: Any) -> dict[str, Any]:
    """The state itself if it is a dictionary with text keys (a module's, an optimizer's); otherwise one entry, ""."""
    is_plain = isinstance(state, dict) and all(isinstance(key, str) for key in state)
    return state if is_plain else {"": state}


def _parts(value: Any) -> Iterator[bytes | Tensor]:
    """What the digest of a value is made of: bytes, and for a large tensor sums that depend on all of its bits."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
        try:
            yield from _bits(value.detach())
        except (RuntimeError, NotImplementedError, TypeError):  # a layout or a class of its own
            yield _written(value)
    elif type(value) in (list, tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for kept in value:
            yield from _parts(kept)
    elif isinstance(value, dict):
        yield f"dict {len(value)}".encode()
        for key, kept in sorted(value.items(), key=lambda item: repr(item[0])):  # their order does not count
            yield repr(key).encode()
            yield from _parts(kept)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        yield repr(value).encode()
    else:
        yield _written(value)


def _bits(value: Tensor) -> Iterator[bytes | Tensor]:
    """The bytes of a small tensor; of a large one, or one on a device, sums that depend on every bit and its place.

    Lines are added up, each multiplied by a pseudo-random number of its own, which is odd so that no bit is lost. The
    upper half of a word is added to its lower half first: all set bits of a 1.0 are at the upper end, where a product
    depends only on the lower bits of the factor. Hashing the bytes would take several times as long.
    """
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    if value.is_cpu and flat.numel() <= _SMALL:
        yield flat.numpy().tobytes()
        return
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = flat.numel() - flat.numel() % (8 * _WORDS)
    sums = torch.zeros(_WORDS, dtype=torch.int64, device=flat.device)
    lines = flat[:end].view(torch.int64).view(-1, _WORDS)
    numbers = _numbers(len(lines), flat.device)[:, None]
    at_once = min(len(lines), _LINES if flat.is_cpu else 64 * _LINES)
    room = torch.empty(at_once, _WORDS, dtype=torch.int64, device=flat.device)
    for first in range(0, len(lines), max(1, at_once)):
        some = lines[first : first + at_once]
        folded = torch.bitwise_right_shift(some, 32, out=room[: len(some)]).add_(some)
        sums += folded.mul_(numbers[first : first + at_once]).sum(0)
    rest = torch.zeros(_WORDS, dtype=torch.int64, device=flat.device)
    rest.view(torch.uint8)[: flat.numel() - end] = flat[end:]
    yield torch.cat([sums, rest])


def _numbers(count: int, device: torch.device) -> Tensor:
    """An odd, pseudo-random number of 64 bits for each line."""
    mixed = torch.arange(1, count + 1, device=device)
    for factor in _FACTORS:
        mixed *= factor
        mixed ^= mixed >> 31
    return mixed | 1


def _to_host(sums: list[Tensor]) -> list[Tensor]:
    """Copies all sums to the CPU, with one copy per device."""
    found: list[Tensor] = list(sums)
    for device in {each.device for each in sums if not each.is_cpu}:
        places = [number for number, each in enumerate(sums) if each.device == device]
        rows = torch.stack([sums[number] for number in places]).cpu()
        for number, row in zip(places, rows, strict=True):
            found[number] = row
    return found


def _written(value: Any) -> bytes:
    """The bytes of a value of any other type, as `torch.save` writes it."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # it cannot be saved: `snapshot` says so, with its name
        return repr(type(value)).encode()
    return buffer.getvalue()
