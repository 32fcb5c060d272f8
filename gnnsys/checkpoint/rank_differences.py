"""States that are taken to be the same on every rank, and what of them is not: compared by digests, at every save.

Rank 0's are saved for all. A rank that has others (running statistics of a batch norm, buffers of the user's) saves its
own beside them, entry by entry, so that a resumed job has on every rank what that rank had. Parameters inside DDP are
the exception: DDP takes them to be the same and never looks again, so ranks that have gone apart train wrongly.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1 << 16  # bytes that are hashed as they are
_WORDS = 64  # words of 8 bytes that are added up side by side
_LINES = 1 << 12  # of so many words, at a time: 2 MB, which stay in a cache
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64: odd, half of bits set

Digests = dict[str, dict[str, str]]  # of the entries of each state, by its name


def digest_states(states: Mapping[str, Any]) -> Digests:
    """A digest of each entry of each state: equal where all bits are."""
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
    """One digest of each state: what ranks tell each other first."""
    return {
        name: hashlib.blake2b(repr(sorted(each.items())).encode(), digest_size=8).hexdigest()
        for name, each in digests.items()
    }


def differing(states: Mapping[str, Any], mine: Digests, first: Digests) -> dict[str, dict[str, Any]]:
    """What a rank has otherwise than rank 0, whose digests are `first`: for each such state what `merged` takes."""
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in first.items():
        keys = [key for key, digest in mine[name].items() if theirs.get(key) != digest]
        if mine[name].keys() != theirs.keys() or (keys and _entries(states[name]) is not states[name]):
            found[name] = {"whole": states[name]}
        elif keys:
            found[name] = {"entries": {key: states[name][key] for key in keys}}
    return found


def keys_of(own: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """For a manifest: the entries of each state that a rank has otherwise; none where it is all of it."""
    return {name: sorted(each.get("entries", ())) for name, each in own.items()}


def differing_file(rank: int) -> str:
    """Where a rank keeps what it has otherwise than rank 0."""
    return f"differing-{rank}.pt"


def merged(state: Any, own: Mapping[str, Any] | None) -> Any:
    """Rank 0's state with what a rank had otherwise; `state` itself is changed."""
    if own is None:
        return state
    if "whole" in own:
        return own["whole"]
    state.update(own["entries"])
    return state


def check_parameters(name: str, value: Any, own: Mapping[str, Any], rank: int) -> None:
    """ValueError where a rank has other parameters in DDP than rank 0."""
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
    """The state itself where it is a dictionary by text, as a module's and an optimizer's are; else a single entry."""
    is_plain = isinstance(state, dict) and all(isinstance(key, str) for key in state)
    return state if is_plain else {"": state}


def _parts(value: Any) -> Iterator[bytes | Tensor]:
    """What a value is made of: text of it, and numbers that all bits of a large tensor go into."""
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
        for key, kept in sorted(value.items(), key=lambda item: repr(item[0])):  # their order is no difference
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

    A line of words is added up word by word, times a number of its own. Numbers are odd, so that no bit is lost, and
    like random ones. A word's upper half is added to its lower one first: all bits of a 1.0 are at the upper end, where
    a product has only the lower ends of the numbers. A hash of the bytes takes several times as long.
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
    """An odd number of 64 bits for each place; mixed, so that those of places that lie side by side are far apart."""
    mixed = torch.arange(1, count + 1, device=device)
    for factor in _FACTORS:
        mixed *= factor
        mixed ^= mixed >> 31
    return mixed | 1


def _to_host(sums: list[Tensor]) -> list[Tensor]:
    """All of them on the CPU; from a device, at once."""
    found: list[Tensor] = list(sums)
    for device in {each.device for each in sums if not each.is_cpu}:
        places = [number for number, each in enumerate(sums) if each.device == device]
        rows = torch.stack([sums[number] for number in places]).cpu()
        for number, row in zip(places, rows, strict=True):
            found[number] = row
    return found


def _written(value: Any) -> bytes:
    """What is of no plain type, as it would be written."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # it cannot be: that is said, with its name, when the state is copied
        return repr(type(value)).encode()
    return buffer.getvalue()
