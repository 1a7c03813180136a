"""Records what a client and a server of torch.distributed.TCPStore say to each other, one JSON file for each of torch's servers.

    python capture.py            writes torch-<version>-libuv.json and torch-<version>-legacy.json beside itself

The client talks to a recording proxy in a process of its own: some calls of torch's binding keep the interpreter lock while they wait.
"""

import datetime
import json
import multiprocessing
import os
import pathlib
import socket
import threading
import time

import torch
import torch.distributed as dist

# The wire carries the client's pid as its first ping; this stands in its place, so that two runs make the same file.
NONCE = "2a3c0000"
SETTLE_S = 0.15


def serve(use_libuv, ports, done):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    ports.put(store.port)
    done.wait()


def proxy(port, ports, events):
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))

    def pump(source, sink, direction):
        while chunk := source.recv(65536):
            events.put((direction, chunk.hex()))
            sink.sendall(chunk)

    answers = threading.Thread(target=pump, args=(server, client, "receive"), daemon=True)
    answers.start()
    pump(client, server, "send")


def conversation(store, libuv):
    """Yields a label after each call; what went over the wire since the last label belongs to it."""
    yield "open"
    for key, value in [("a", b"bc"), ("e", b""), ("bytes", bytes(range(256)))]:
        store.set(key, value)
        yield f"set {key}"
    for key in ["a", "e", "bytes"]:
        assert store.get(key) is not None
        yield f"get {key}"
    for delta in [5, -7]:
        store.add("n", delta)
        yield f"add n {delta}"
    store.compare_set("cs", "", "v1")
    yield "compare_set cs empty v1"
    store.compare_set("cs", "v1", "v2")
    yield "compare_set cs v1 v2"
    store.compare_set("absent", "x", "v3")
    yield "compare_set absent x v3"
    store.check(["a", "zz"])
    yield "check a zz"
    store.check(["a", "e"])
    yield "check a e"
    store.wait(["a", "e"])
    yield "wait a e"
    try:
        store.wait(["zz"], datetime.timedelta(milliseconds=300))
        raise AssertionError("zz never comes")
    except dist.DistStoreError:
        pass
    yield "wait zz, timed out"
    store.num_keys()
    yield "num_keys"
    for _ in range(2):
        store.delete_key("a")
        yield "delete a"
    store.append("ap", "xy")
    yield "append ap"
    store.append("ap", "z")
    yield "append ap"
    store.multi_set(["m1", "m2"], ["1", "22"])
    yield "multi_set m1 m2"
    store.multi_get(["m1", "ap", "m2"])
    yield "multi_get m1 ap m2"
    dist.PrefixStore("out", dist.PrefixStore("in", store)).set("k", "v")
    yield "set k under two prefixes"
    if libuv:
        store.queue_push("q", "v1")
        yield "queue_push q"
        store.queue_push("q", "v2")
        yield "queue_push q"
        store.queue_len("q")
        yield "queue_len q"
        for _ in range(2):
            store.queue_pop("q")
            yield "queue_pop q"


def capture(use_libuv):
    context = multiprocessing.get_context("spawn")
    ports, events, done = context.Queue(), context.Queue(), context.Event()
    server = context.Process(target=serve, args=(use_libuv, ports, done), daemon=True)
    server.start()
    relay = context.Process(target=proxy, args=(ports.get(), ports, events), daemon=True)
    relay.start()
    store = dist.TCPStore("127.0.0.1", ports.get(), world_size=1, is_master=False, use_libuv=use_libuv)
    steps = []
    nonce = os.getpid().to_bytes(4, "little").hex()
    for label in conversation(store, use_libuv):
        time.sleep(SETTLE_S)
        said = []
        while not events.empty():
            direction, data = events.get()
            if said and said[-1][0] == direction:
                said[-1][1] += data
            else:
                said.append([direction, data])
        if label == "open":
            said = [[direction, data.replace(nonce, NONCE)] for direction, data in said]
        steps.append({"call": label, "bytes": said})
    done.set()
    server.join()
    relay.terminate()
    backend = "libuv" if use_libuv else "legacy"
    found = {"torch": torch.__version__, "backend": backend, "steps": steps}
    path = pathlib.Path(__file__).with_name(f"torch-{torch.__version__.split('+')[0]}-{backend}.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    for backend in [True, False]:
        capture(backend)
