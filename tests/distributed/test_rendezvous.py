import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dseekjax.distributed import rendezvous
from dseekjax.distributed.membership import Membership
from dseekjax.distributed.rendezvous import meet
from dseekjax.errors import UserError


@pytest.fixture(autouse=True)
def _all_threads_start_soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.7)


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def gather(*members, settings=({},), timeout=1.0, delays=(0,)):
    """What each member is told, None for one that may go on; each meets in a thread of its own."""

    def one(number):
        time.sleep(delays[number % len(delays)])
        try:
            meet(members[number], settings[number % len(settings)], timeout)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, range(len(members))))


def members(num_processes, address, *process_ids):
    return [Membership(address, num_processes, process_id) for process_id in process_ids]


@pytest.mark.parametrize("delays", [(0,), (0.6, 0, 0.3, 0), (0, 0, 0, 0.8)])
def test_all_meet_whoever_comes_last(delays):
    assert gather(*members(4, free_address(), 2, 0, 3, 1), delays=delays, timeout=3) == [None] * 4


def test_many_meet():
    assert gather(*members(100, free_address(), *range(100)), timeout=20) == [None] * 100


def test_the_port_is_free_again_for_jax_and_for_the_next_run():
    address = free_address()
    for _ in range(2):
        assert gather(*members(2, address, 0, 1)) == [None, None]


def test_who_is_missing_is_named_to_all_who_came():
    address = free_address()
    begin = time.monotonic()
    told = gather(*members(6, address, 0, 4))
    assert time.monotonic() - begin < 2
    assert told[0] == told[1]
    assert told[0].startswith(
        f"processes 1-3, 5 of 6 did not come to {address} within 1 seconds, only processes 0, 4 did"
    )


def test_the_least_patient_ends_the_waiting_of_all():
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(gather, *members(3, address, 0), timeout=60)
        hasty = pool.submit(gather, *members(3, address, 1), timeout=1)
        assert patient.result(timeout=10) == hasty.result()
    assert "process 2 of 3 did not come" in patient.result()[0]


def test_without_a_coordinator_the_address_is_named():
    address = free_address()
    for told in gather(*members(3, address, 1, 2)):
        assert f"did not find the coordinator, which is process 0, at {address} within 1 seconds" in told
        assert "nothing listens there" in told


def test_a_name_of_no_machine_is_named():
    zero, one = gather(*members(2, "nowhere.invalid:4711", 0, 1))
    assert "process 0 did not find itself at nowhere.invalid:4711" in zero
    assert "process 1 did not find the coordinator" in one
    assert "no machine of that name" in one


@pytest.mark.parametrize("twice", [0, 1])
def test_two_of_one_number_are_named_to_all(twice):
    told = gather(*members(4, free_address(), 0, 1, 2, twice), timeout=30)
    assert len(set(told)) == 1
    host = socket.gethostname()
    assert f"2 processes say that they are process {twice} (on {host} and {host})" in told[0]


def test_one_that_comes_again_after_it_died_is_not_two():
    address = free_address()
    host, _, port = address.partition(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, *members(3, address, 0), timeout=10)
        time.sleep(0.2)
        with socket.create_connection((host, int(port))) as dead:
            dead.sendall(b'{"process_id": 1, "num_processes": 3, "host": "h", "patience": 60, "settings": {}}\n')
            time.sleep(0.1)
        time.sleep(0.1)
        assert gather(*members(3, address, 1, 2)) == [None, None]
        assert first.result() == [None]


def test_numbers_of_processes_that_differ_are_named():
    address = free_address()
    told = gather(*members(3, address, 0, 2), *members(4, address, 1), timeout=30)
    assert len(set(told)) == 1
    assert "distributed.num_processes is 3 on processes 0, 2 and 4 on process 1" in told[0]


def test_keys_that_differ_are_named_with_the_processes():
    same = {"model.num_layers": 2, "optimizer.learning_rate": 0.1}
    other = {"model.num_layers": 2, "optimizer.learning_rate": 0.2, "data.sources.0.path": "a.txt"}
    told = gather(*members(3, free_address(), 0, 1, 2), settings=(same, same, other), timeout=30)
    assert len(set(told)) == 1
    assert "optimizer.learning_rate is 0.1 on processes 0-1 and 0.2 on process 2" in told[0]
    assert "data.sources.0.path is missing on processes 0-1 and 'a.txt' on process 2" in told[0]
    assert "num_layers" not in told[0]


@pytest.mark.parametrize("talk", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b""])
def test_another_program_on_the_port_is_named(talk):
    def answer(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(talk)

    with socket.create_server(("", 0)) as listener:
        threading.Thread(target=answer, args=[listener], daemon=True).start()
        port = listener.getsockname()[1]
        zero, one = gather(*members(2, f"localhost:{port}", 0, 1))
        listener.shutdown(socket.SHUT_RDWR)
    assert f"port {port} of this machine, where process 0 is to listen at localhost:{port}, is in use" in zero
    assert "what answers there is no coordinator" in one


def test_what_connects_by_mistake_is_ignored():
    address = free_address()
    host, _, port = address.partition(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, *members(2, address, 0), timeout=10)
        time.sleep(0.2)
        hello = {"process_id": "one", "num_processes": 2, "host": "h", "patience": None, "settings": {}}
        strange = json.dumps(hello).encode() + b"\n"
        for talk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[]\n", b"x" * 100_000, strange):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(talk)
        assert gather(*members(2, address, 1)) == [None]
        assert first.result() == [None]
