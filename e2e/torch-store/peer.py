"""A TCPStore of torch, driven line by line: JSON requests on stdin, JSON answers on stdout. Values travel as hex.

    python peer.py server|client PORT libuv|legacy
"""

import datetime
import json
import sys

import torch.distributed as dist


def perform(store, request):
    call, arguments = request["call"], request.get("arguments", [])
    to_bytes = bytes.fromhex
    if call == "set":
        return store.set(arguments[0], to_bytes(arguments[1]))
    if call == "get":
        return store.get(arguments[0]).hex()
    if call == "add":
        return store.add(*arguments)
    if call == "compare_set":
        return store.compare_set(*arguments).hex()
    if call == "check":
        return store.check(arguments)
    if call == "wait":
        return store.wait(arguments[0], datetime.timedelta(milliseconds=arguments[1]))
    if call == "delete":
        return store.delete_key(arguments[0])
    if call == "num_keys":
        return store.num_keys()
    if call == "append":
        return store.append(arguments[0], arguments[1])
    if call == "multi_get":
        return [value.hex() for value in store.multi_get(arguments)]
    if call == "multi_set":
        return store.multi_set(arguments[0], arguments[1])
    if call == "list_keys":
        return sorted(store.list_keys())
    if call == "queue":
        store.queue_push(arguments[0], arguments[1])
        length = store.queue_len(arguments[0])
        return [length, store.queue_pop(arguments[0]).hex()]
    if call == "prefixed":
        return dist.PrefixStore("out", dist.PrefixStore("in", store)).set(arguments[0], arguments[1])
    raise ValueError(f"unknown call {call}")


def main():
    role, port, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=role == "server",
        wait_for_workers=False,
        use_libuv=backend == "libuv",
        timeout=datetime.timedelta(seconds=60),
    )
    print(json.dumps({"port": store.port}), flush=True)
    for line in sys.stdin:
        try:
            answer = {"value": perform(store, json.loads(line))}
        except Exception as error:  # noqa: BLE001: whatever torch raises is the answer
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


main()
