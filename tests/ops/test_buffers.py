"""Pooled buffers: used again when, and only when, nobody can see them any more."""

from __future__ import annotations

import os
import pickle
import signal
import threading

import torch

from gnnsys.ops.buffers import BufferPool

SHAPE = (1000, 100)


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = BufferPool(max_free=2)
    tensor = pool.empty(SHAPE, torch.float32)
    address = tensor.data_ptr()
    row = tensor[3]
    del tensor
    assert pool.free_bytes() == 0  # a view still sees it
    assert pool.empty(SHAPE, torch.float32).data_ptr() != address
    del row
    assert pool.free_bytes() > 0
    addresses = {pool.empty(SHAPE, torch.float32).data_ptr() for _ in range(3)}
    assert address in addresses


def test_what_autograd_saved_is_not_used_again() -> None:
    pool = BufferPool(max_free=2)
    weight = torch.ones(100, requires_grad=True)
    x = pool.empty(SHAPE, torch.float32).fill_(2.0)
    loss = (x * weight).sum()
    del x
    for _ in range(4):
        pool.empty(SHAPE, torch.float32).fill_(-1.0)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((100,), 2000.0))


def test_a_copy_begins_with_no_memory() -> None:
    pool = BufferPool(max_free=2)
    lent = pool.empty(SHAPE, torch.float32)
    copied = pickle.loads(pickle.dumps(pool))
    assert pool.held_bytes() >= lent.nbytes and copied.held_bytes() == 0
    copied.empty(SHAPE, torch.float32)
    assert copied.free_bytes() > 0  # it keeps buffers as the first does


def test_no_more_than_the_bound_is_kept() -> None:
    pool = BufferPool(max_free=2)
    tensors = [pool.empty(SHAPE, torch.float32) for _ in range(5)]
    assert len({t.data_ptr() for t in tensors}) == 5
    size = tensors[0].nbytes
    del tensors
    assert size * 2 <= pool.free_bytes() <= size * 2 * 1.125


def test_sizes_that_differ_by_little_share_buffers_and_others_do_not() -> None:
    pool = BufferPool(max_free=1)
    first = pool.empty((1000, 100), torch.float32)
    address = first.data_ptr()
    del first
    second = pool.empty((1003, 100), torch.float32)
    assert second.data_ptr() == address
    assert second.untyped_storage().nbytes() == second.nbytes
    del second
    third = pool.empty((7000, 100), torch.float32)  # a new buffer, so the old one is kept, not taken
    assert third.data_ptr() != address
    assert pool.free_bytes() > 0


def test_every_dtype_and_empty_shapes_are_lent() -> None:
    pool = BufferPool(max_free=1)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        tensor = pool.empty(SHAPE, dtype)
        assert tensor.dtype == dtype and tensor.shape == SHAPE
        tensor.zero_()
        assert tensor.data_ptr() % 64 == 0
    assert pool.empty((0, 5), torch.float32).shape == (0, 5)


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(max_free=2)
    errors = []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = pool.empty((200, 100), torch.float32).fill_(mark)
            if not bool((tensor == mark).all()):
                errors.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_forked_process_does_not_wait_for_a_thread_it_has_not() -> None:
    pool = BufferPool(2)
    pool._lock.acquire()  # by a thread that the child will not have
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if pool.empty((1 << 16,), torch.float64).numel() == 1 << 16 else 1)
    pool._lock.release()
    assert os.waitpid(child, 0)[1] == 0
