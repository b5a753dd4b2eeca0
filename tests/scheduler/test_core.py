"""Order, repeats, gaps, bounds, fairness: on items that carry nothing."""

import threading
import time

import numpy as np
import pytest

from spindle.errors import Conflict, EngineClosed, InvalidRequest, NotFound, Overloaded, ServerError
from spindle.future import Future, failed
from spindle.scheduler import Item, Kind, Scheduler, SchedulerConfig


def train(model="a", seq=1, lengths=(4,), nbytes=10, fingerprint=None, budget=16):
    item = Item(model, seq, Kind.TRAIN, Future(), fingerprint=fingerprint or f"{model}{seq}".encode(), nbytes=nbytes)
    item.cut(np.array(lengths, dtype=np.int64), budget)
    return item


def operation(model="a", seq=1, kind=Kind.DEVICE):
    return Item(model, seq, kind, Future(), fingerprint=b"op")


def make(devices=1, adapters=("a",), client=None, **config):
    scheduler = Scheduler(SchedulerConfig(**{"token_budget": 16, **config}), devices)
    for name in adapters:
        scheduler.add_adapter(name, client or name, 0)
    return scheduler


def finish(scheduler, block):
    whole = scheduler.completed(block)
    scheduler.block_done(block)
    if block.item.blocks_left == 0:
        block.item.future.settle(None)
    return whole


def step(scheduler, device=0):
    """Take and complete the next work; returns what ran as (model, seq) pairs."""
    work = scheduler.next_work(device, timeout_s=0)
    if work is None:
        return []
    for item in work.operations:
        scheduler.operation_done(item)
        item.future.settle(None)
    for block in work.blocks:
        finish(scheduler, block)
    return [(i.model_id, i.seq_id) for i in work.operations] + [(b.item.model_id, b.item.seq_id) for b in work.blocks]


def drain(scheduler):
    ran = []
    while more := step(scheduler):
        ran += more
    return ran


def test_requests_run_in_seq_id_order_whatever_order_they_come_in():
    scheduler = make()
    for seq in (3, 2, 1):
        assert step(scheduler) == []
        scheduler.put(train(seq=seq, lengths=(16,)))
    assert drain(scheduler) == [("a", 1), ("a", 2), ("a", 3)]


def test_an_operation_waits_for_all_before_it_and_holds_all_behind_it():
    scheduler = make()
    for seq, item in enumerate([train(seq=1), train(seq=2), operation(seq=3), train(seq=4)], 1):
        assert item.seq_id == seq
        scheduler.put(item)
    first = scheduler.next_work(0, 0)
    assert [b.item.seq_id for b in first.blocks] == [1, 2]
    assert scheduler.next_work(0, 0) is None
    finish(scheduler, first.blocks[0])
    assert scheduler.next_work(0, 0) is None
    finish(scheduler, first.blocks[1])
    second = scheduler.next_work(0, 0)
    assert [i.seq_id for i in second.operations] == [3]
    assert scheduler.next_work(0, 0) is None
    scheduler.operation_done(second.operations[0])
    assert step(scheduler) == [("a", 4)]


def test_a_save_frees_its_adapter_once_it_has_its_copy():
    scheduler = make()
    save = operation(seq=1, kind=Kind.IO)
    scheduler.put(save)
    scheduler.put(train(seq=2))
    assert scheduler.next_io() is save
    assert scheduler.next_work(0, 0) is None
    scheduler.release_adapter(save)
    assert step(scheduler) == [("a", 2)]


def test_a_repeat_gets_the_first_ones_future_and_other_content_is_refused():
    scheduler = make()
    first = train(seq=1, fingerprint=b"x")
    future = scheduler.put(first)
    assert scheduler.put(train(seq=1, fingerprint=b"x")) is future
    with pytest.raises(Conflict, match="seq_id 1 of a was already used by a different request"):
        scheduler.put(train(seq=1, fingerprint=b"y"))
    with pytest.raises(Conflict, match="seq_id 1 of a was already used"):
        scheduler.put(operation(seq=1))
    assert drain(scheduler) == [("a", 1)]
    assert scheduler.put(train(seq=1, fingerprint=b"x")) is future
    for seq in range(2, 30):
        scheduler.put(train(seq=seq))
    drain(scheduler)
    scheduler.put(train(seq=30))
    drain(scheduler)
    with pytest.raises(Conflict, match="seq_id 1 of a was answered before and its answer is no longer kept"):
        scheduler.put(train(seq=1, fingerprint=b"x"))


def test_a_rejected_request_takes_its_place():
    scheduler = make()
    scheduler.put(train(seq=2))
    assert step(scheduler) == []
    bad = failed(InvalidRequest("no"))
    assert scheduler.put(Item("a", 1, Kind.SKIP, bad, fingerprint=b"e")) is bad
    assert step(scheduler) == [("a", 2)]


def test_a_gap_is_given_up_with_a_clear_error_and_the_order_goes_on():
    scheduler = make(gap_timeout_s=0.02)
    held = [train(seq=3), train(seq=4)]
    for item in held:
        scheduler.put(item)
    scheduler.put(train(seq=1))
    assert step(scheduler) == [("a", 1)]
    assert scheduler.next_work(0, timeout_s=0.2) is None
    for item in held:
        with pytest.raises(InvalidRequest, match=rf"seq_id {item.seq_id} of a waited 0.02 s for seq_id 2, which never came"):
            item.future.result(0)
    with pytest.raises(Conflict, match="seq_id 2 of a came after the requests behind it had given up"):
        scheduler.put(train(seq=2))
    scheduler.put(train(seq=5))
    assert step(scheduler) == [("a", 5)]
    assert scheduler.stats()["queued_bytes"] == 0


def test_what_may_wait_behind_a_gap_is_bounded():
    scheduler = make(max_held_requests=2)
    scheduler.put(train(seq=3))
    scheduler.put(train(seq=4))
    with pytest.raises(Overloaded, match="2 requests of a wait for seq_id 1; at most 2 may"):
        scheduler.put(train(seq=5))


def test_queued_bytes_are_bounded_per_client_and_in_all():
    scheduler = make(adapters=("a", "b"), max_client_queue_bytes=25, max_queue_bytes=40)
    scheduler.put(train("a", 1))
    scheduler.put(train("a", 2))
    with pytest.raises(Overloaded, match="20 bytes of requests of this client are queued and this one has 10; at most 25 may be"):
        scheduler.put(train("a", 3))
    scheduler.put(train("b", 1, nbytes=15))
    with pytest.raises(Overloaded, match="35 bytes of requests in all"):
        scheduler.check_room(6)
    drain(scheduler)
    assert scheduler.stats()["queued_bytes"] == 0
    scheduler.put(train("a", 3))


def test_a_cancelled_request_never_runs_and_does_not_hold_up_the_rest():
    scheduler = make()
    futures = [scheduler.put(item) for item in (train(seq=1), operation(seq=2), train(seq=3))]
    assert futures[0].cancel() and futures[1].cancel()
    assert drain(scheduler) == [("a", 3)]
    assert scheduler.stats()["queued_requests"] == 0


def test_cancelling_what_stands_before_an_operation_lets_it_run():
    scheduler = make()
    first, second = scheduler.put(train(seq=1)), scheduler.put(operation(seq=2))
    assert first.cancel()
    assert drain(scheduler) == [("a", 2)]
    assert second.done() and not second.cancelled()


def test_a_failed_item_runs_no_further_block_and_frees_the_order():
    scheduler = make()
    long = train(seq=1, lengths=(16, 16, 16))
    scheduler.put(long)
    scheduler.put(operation(seq=2))
    work = scheduler.next_work(0, 0)
    scheduler.fail(long, RuntimeError("broken"))
    assert scheduler.next_work(0, 0) is None, "its running block still may touch the adapter"
    assert finish(scheduler, work.blocks[0]) == []
    assert step(scheduler) == [("a", 2)]
    with pytest.raises(RuntimeError, match="broken"):
        long.future.result(0)


def test_blocks_that_end_out_of_order_are_committed_in_order():
    scheduler = make(devices=2)
    scheduler.put(train(seq=1, lengths=(16, 16)))
    scheduler.put(train(seq=2, lengths=(16, 16)))
    works = [scheduler.next_work(d, 0).blocks[0] for d in (0, 1, 0, 1)]
    assert [(b.item.seq_id, b.index) for b in works] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert finish(scheduler, works[3]) == []
    assert finish(scheduler, works[2]) == []
    assert finish(scheduler, works[1]) == []
    assert [i.seq_id for i in finish(scheduler, works[0])] == [1, 2]


def test_small_requests_stay_on_the_home_device_and_long_ones_spread():
    scheduler = make(devices=2)
    scheduler.put(train(seq=1))
    assert scheduler.next_work(1, 0) is None
    assert step(scheduler) == [("a", 1)]
    scheduler.put(train(seq=2, lengths=(16, 16)))
    assert scheduler.next_work(1, 0).blocks[0].index == 0
    assert scheduler.next_work(0, 0).blocks[0].index == 1


def test_a_micro_batch_holds_several_adapters_within_the_budget_or_one_long_sequence():
    scheduler = make(adapters=("a", "b", "c"))
    scheduler.put(train("a", 1, (8,)))
    scheduler.put(train("b", 1, (6,)))
    scheduler.put(train("c", 1, (40,)))
    assert sorted(step(scheduler)) == [("a", 1), ("b", 1)]
    assert step(scheduler) == [("c", 1)]


def test_an_unknown_adapter_and_a_removed_one_say_so():
    scheduler = make()
    with pytest.raises(NotFound, match="no adapter 'zz'"):
        scheduler.put(train("zz"))
    future = scheduler.put(train("a", 1))
    scheduler.remove_adapter("a", NotFound("gone"))
    with pytest.raises(NotFound, match="gone"):
        future.result(0)
    with pytest.raises(NotFound):
        scheduler.remove_adapter("a", NotFound("gone"))
    assert scheduler.stats()["queued_requests"] == 0


def test_removing_an_adapter_while_it_runs_leaks_nothing():
    scheduler = make(adapters=("a", "b"), client="c")
    scheduler.put(train("a", 1, (16, 16)))
    scheduler.put(operation("b", 1))
    first, second = scheduler.next_work(0, 0), scheduler.next_work(0, 0)
    scheduler.remove_adapter("a", NotFound("gone"))
    scheduler.remove_adapter("b", NotFound("gone"))
    scheduler.add_adapter("a", "c", 0)  # the same name again: what still runs of the old one must not count against it
    again = train("a", 1)
    scheduler.put(again)
    for work in (first, second):
        for block in work.blocks:
            assert finish(scheduler, block) == []
        for item in work.operations:
            scheduler.operation_done(item)
    assert step(scheduler) == [("a", 1)]
    scheduler.put(operation("a", 2))
    assert step(scheduler) == [("a", 2)]
    assert scheduler.stats()["queued_requests"] == 0
    assert scheduler.stats()["queued_bytes"] == 0


def test_close_fails_what_has_not_started_and_wakes_the_waiters():
    scheduler = make()
    scheduler.put(train(seq=2))
    ended = []
    waiter = threading.Thread(target=lambda: ended.append(scheduler.next_work(0)))
    waiter.start()
    time.sleep(0.02)
    scheduler.close()
    waiter.join(2)
    assert ended == [None]
    with pytest.raises(EngineClosed):
        scheduler.put(train(seq=1))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"token_budget": 0}, "token_budget must be positive, got 0"),
        ({"client_weights": {"x": 0.0}}, r"client_weights\['x'\] must be positive, got 0.0"),
    ],
)
def test_a_config_checks_itself(config, text):
    with pytest.raises(ValueError, match=text):
        SchedulerConfig(**config)


def test_a_flooding_client_delays_anothers_request_by_no_more_than_a_micro_batch_or_two():
    scheduler = make(adapters=("flood", "small"))
    for seq in range(1, 65):
        scheduler.put(train("flood", seq, (16,) * 4))
    for _ in range(10):
        step(scheduler)
    scheduler.put(train("small", 1, (4,)))
    waited = 0
    while ("small", 1) not in step(scheduler):
        waited += 1
    assert waited <= 1


def test_weights_share_out_the_tokens():
    scheduler = make(adapters=("heavy", "light"), client_weights={"heavy": 3.0})
    for seq in range(1, 401):
        scheduler.put(train("heavy", seq, (16,)))
        scheduler.put(train("light", seq, (16,)))
    ran = [step(scheduler)[0][0] for _ in range(200)]
    assert 2.7 <= ran.count("heavy") / ran.count("light") <= 3.3


def test_only_who_has_used_less_overtakes_a_micro_batch_that_lies_ready():
    scheduler = make(adapters=("flood", "small"))
    for seq in range(1, 9):
        scheduler.put(train("flood", seq, (16,)))
    ready = scheduler.next_work(0, 0).blocks
    assert scheduler.overtaking_work(0, [b.item for b in ready]) is None
    scheduler.put(train("small", 1, (4,)))
    first = scheduler.overtaking_work(0, [b.item for b in ready]).blocks
    assert [b.item.model_id for b in first] == ["small"]
    assert scheduler.overtaking_work(0, [b.item for b in first]) is None, "the flood may not go before the small one"
    finish(scheduler, first[0])
    scheduler.put(operation("small", 2))
    assert [i.model_id for i in scheduler.overtaking_work(0, [b.item for b in ready]).operations] == ["small"]


def test_credit_kept_for_want_of_room_is_no_claim_to_overtake():
    """Taking the small block tops up the flood's account too, whose own block does not fit beside it."""
    scheduler = make(adapters=("flood", "small"))
    for seq in range(1, 9):
        scheduler.put(train("flood", seq, (16,)))
    running = scheduler.next_work(0, 0).blocks
    scheduler.put(train("small", 1, (4,)))
    ready = scheduler.next_work(0, 0).blocks
    if [b.item.model_id for b in ready] == ["flood"]:  # its turn came first: that of the small one is next
        finish(scheduler, running[0])
        running, ready = ready, scheduler.next_work(0, 0).blocks
    assert [b.item.model_id for b in ready] == ["small"]
    assert scheduler.overtaking_work(0, [b.item for b in ready]) is None


def test_who_comes_back_from_idleness_is_level_with_the_others():
    """A client that used little long ago must not overtake for as long as it has 'saved up'."""
    scheduler = make(adapters=("steady", "back"))
    scheduler.put(train("back", 1, (4,)))
    finish(scheduler, scheduler.next_work(0, 0).blocks[0])
    for seq in range(1, 41):
        scheduler.put(train("steady", seq, (16,)))
        finish(scheduler, scheduler.next_work(0, 0).blocks[0])
    scheduler.put(train("steady", 41, (16,)))
    ready = scheduler.next_work(0, 0).blocks
    overtaken = 0
    for seq in range(2, 20):
        scheduler.put(train("back", seq, (16,)))
        if (work := scheduler.overtaking_work(0, [b.item for b in ready])) is None:
            break
        overtaken += 1
        finish(scheduler, work.blocks[0])
    assert overtaken <= 2


def waiting(scheduler, got):
    """A device thread that waits for work."""
    thread = threading.Thread(target=lambda: got.append(scheduler.next_work(0)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not scheduler._idle[0] and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread


def test_whoever_woke_a_device_may_wait_until_it_has_begun():
    scheduler, got = make(), []
    device = waiting(scheduler, got)
    scheduler.put(train())
    device.join(10)
    began = threading.Timer(0.05, lambda: scheduler.begun(0))
    began.start()
    started = time.monotonic()
    scheduler.let_begin(30)
    assert 0.02 < time.monotonic() - started < 10
    began.join(10)
    scheduler.let_begin(30)  # nobody is about to begin any more
    finish(scheduler, got[0].blocks[0])


def test_nobody_waits_for_a_device_that_is_busy_or_was_woken_for_nothing_and_never_longer_than_asked():
    scheduler, got = make(), []
    scheduler.put(train())  # no thread waits for it
    started = time.monotonic()
    scheduler.let_begin(30)
    assert time.monotonic() - started < 5
    step(scheduler)
    device = waiting(scheduler, got)
    future = scheduler.put(train(seq=2))
    started = time.monotonic()
    scheduler.let_begin(0.02)  # it has taken the work and does not say that it began
    assert 0.015 < time.monotonic() - started < 5
    device.join(10)
    finish(scheduler, got[0].blocks[0])
    assert future.done()
    device = waiting(scheduler, got)  # waits again: what it was told before is over
    started = time.monotonic()
    scheduler.let_begin(30)
    assert time.monotonic() - started < 5
    scheduler.close()
    device.join(10)


def test_a_closed_scheduler_counts_nothing_as_queued():
    scheduler = make(adapters=("a", "b"))
    for item in (train(seq=1), train(seq=3), operation(seq=2), train("b"), operation("b", 2, Kind.IO)):
        scheduler.put(item)
    running = scheduler.next_work(0, timeout_s=0).blocks
    scheduler.close()
    assert scheduler.stats()["queued_requests"] == len(running)
    for block in running:
        finish(scheduler, block)
    stats = scheduler.stats()
    assert (stats["queued_requests"], stats["queued_bytes"]) == (0, 0)


def test_what_runs_for_an_adapter_that_was_removed_fails_too_when_a_device_stops():
    scheduler = make(adapters=("a", "b", "c"))
    futures = [scheduler.put(train("a")), scheduler.put(operation("b"))]
    operations = scheduler.next_work(0, timeout_s=0).operations
    blocks = scheduler.next_work(0, timeout_s=0).blocks
    assert len(operations) == len(blocks) == 1
    for name in ("a", "b", "c"):
        scheduler.remove_adapter(name, NotFound("gone"))
    scheduler.close(ServerError("the device is gone"))
    for future in futures:
        assert str(future.exception(0)) == "the device is gone"
    assert scheduler.stats()["queued_requests"] == 0


def test_nothing_of_a_removed_adapter_is_kept_once_it_has_ended():
    scheduler = make(adapters=("a", "b"))
    scheduler.put(train("a"))
    (block,) = scheduler.next_work(0, timeout_s=0).blocks
    scheduler.remove_adapter("a", NotFound("gone"))
    assert len(scheduler._leaving) == 1
    finish(scheduler, block)
    scheduler.remove_adapter("b", NotFound("gone"))
    assert not scheduler._leaving
