"""Gloo's side of `ep bench collectives`: one rank of the comparison, through torch.distributed over loopback.

It takes one command a line from the benchmark's socket and answers it in one line; what the commands mean, and which values move, is told in
protocol.ts and pattern.ts.

    python gloo.py SOCKET RANK SIZE RENDEZVOUS_FILE BYTES
"""

import datetime
import os
import socket
import sys
import time

# Both before torch is loaded: its threads would take the cores of the other ranks, and another interface is not this machine's loopback.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist

PERIOD, RANK_STEP, SAMPLES, GROWTH_BITS, POISON = 4093, 1009, 1024, 112, -1.0
SUM = dist.ReduceOp.SUM


def values(source, offset, length):
    return ((torch.arange(length) + offset + source * RANK_STEP) % PERIOD).float()


def repeat(data, pattern):
    """Fills `data` with `pattern` over and over."""
    done = min(len(data), len(pattern))
    data[:done].copy_(pattern[:done])
    while done < len(data):
        part = min(done, len(data) - done)
        data[done : done + part].copy_(data[:part])
        done += part


class Wrong(Exception):
    """A result that is not what it should be."""


class Rank:
    def __init__(self, rank, size, most_bytes):
        self.rank, self.size = rank, size
        self.inputs = torch.empty(most_bytes // 4)
        self.outputs = torch.empty(most_bytes // 4)
        # An all-reduce in place multiplies its values by `size` with every call.
        self.most_calls = GROWTH_BITS // max(1, (size - 1).bit_length())
        self.filled = None
        self.calls_made = 0

    def result(self, op, count):
        if op == "barrier":
            return self.outputs[:0]
        if op in ("all-reduce", "broadcast"):
            return self.inputs[:count]
        return self.outputs[: count // self.size if op == "reduce-scatter" else count]

    def expected(self, op, count):
        """(first element, length, pattern) of every stretch of the result, for one call."""
        block = count // self.size
        if op == "broadcast":
            return [(0, count, values(0, 0, PERIOD))]
        if op == "all-gather":
            return [(q * block, block, values(q, q * block, PERIOD)) for q in range(self.size)]
        if op == "all-to-all":
            return [(q * block, block, values(q, self.rank * block, PERIOD)) for q in range(self.size)]
        if op == "barrier":
            return []
        at, length = (self.rank * block, block) if op == "reduce-scatter" else (0, count)
        scale = float(self.size) ** (self.calls_made - 1) if op == "all-reduce" else 1.0
        return [(0, length, sum(values(q, at, PERIOD) for q in range(self.size)) * scale)]

    def step(self, op, count):
        length = len(self.result(op, count))
        return 1 if length <= SAMPLES else length // SAMPLES | 1

    def check(self, op, count, step):
        result = self.result(op, count)
        for first, length, pattern in self.expected(op, count):
            offset = -first % step
            found = result[first + offset : first + length : step]
            if step == 1:
                wanted = torch.empty(length)
                repeat(wanted, pattern)
            else:
                wanted = pattern[torch.arange(offset, length, step) % PERIOD]
            if not torch.equal(found, wanted):
                i = int((found != wanted).nonzero()[0])
                at = first + offset + i * step
                raise Wrong(
                    f"{op} element {at} of {len(result)}: found {found[i].item()}, expected {wanted[i].item()}"
                )

    def prepare(self, op, count, calls, poison_step):
        grows = op == "all-reduce"
        if self.filled != (op, count) or (grows and self.calls_made + calls > self.most_calls):
            block = count // self.size
            length, offset = (block, self.rank * block) if op == "all-gather" else (count, 0)
            repeat(self.inputs[:length], values(self.rank, offset, PERIOD))
            self.filled, self.calls_made = (op, count), 0
        self.calls_made += calls
        if not grows and not (op == "broadcast" and self.rank == 0):
            self.result(op, count)[::poison_step] = POISON

    def caller(self, op, count):
        inputs, outputs, block = self.inputs[:count], self.outputs[:count], count // self.size
        mine, sums = inputs[:block], outputs[:block]
        return {
            "all-reduce": lambda: dist.all_reduce(inputs, op=SUM),
            "broadcast": lambda: dist.broadcast(inputs, 0),
            "all-gather": lambda: dist.all_gather_into_tensor(outputs, mine),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(sums, inputs, op=SUM),
            "all-to-all": lambda: dist.all_to_all_single(outputs, inputs),
            "barrier": dist.barrier,
        }[op]

    def run(self, op, count, calls, warm, batches):
        call, step = self.caller(op, count), self.step(op, count)
        took = []
        for batch in range(-warm, batches):
            self.prepare(op, count, calls, step)
            dist.barrier()
            begin = time.monotonic_ns()
            for _ in range(calls):
                call()
            end = time.monotonic_ns()
            dist.barrier()  # as ours: nobody compares while another's row goes on
            self.check(op, count, step)
            if batch >= 0:
                took.append(end - begin)
        return took

    def verify(self, op, count):
        """Every element of the last timed call, then of one more call whose result was poisoned throughout."""
        self.check(op, count, 1)
        self.filled = None
        self.prepare(op, count, 1, 1)
        dist.barrier()
        self.caller(op, count)()
        self.check(op, count, 1)
        return []

    def verify_barrier(self, rounds):
        """When this rank came to each barrier and when it left, by the clock that all processes of a machine share."""
        times = []
        for turn in range(rounds):
            time.sleep(1e-4 * ((self.rank + turn) % self.size))
            times.append(time.monotonic_ns())
            dist.barrier()
            times.append(time.monotonic_ns())
        return times

    def obey(self, words):
        verb, _, op, _, *numbers = words
        if verb == "run":
            return self.run(op, *map(int, numbers))
        return self.verify_barrier(int(numbers[0])) if op == "barrier" else self.verify(op, int(numbers[0]))


def answer(rank, words):
    try:
        return " ".join(["ok", *map(str, rank.obey(words))])
    except (RuntimeError, NotImplementedError, Wrong) as error:
        said = " ".join(str(error).split())
        # What this torch's Gloo has not; all ranks alike.
        absent = isinstance(error, NotImplementedError) or "does not support" in said or "not implemented" in said
        return f"{'unsupported' if absent else 'failed'} rank {rank.rank}: {said}"


def main():
    path, rank, size, rendezvous, most_bytes = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(size),
        timeout=datetime.timedelta(seconds=120),
    )
    place = Rank(int(rank), int(size), int(most_bytes))
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    lines = link.makefile("rw", buffering=1)
    print(f"rank {rank}", file=lines)
    for line in lines:
        if line == "end\n":
            dist.destroy_process_group()
            return
        print(answer(place, line.split()), file=lines)
    # The benchmark is gone, and perhaps the other ranks with it: nothing to wait for.
    os._exit(1)


main()
