"""One torch rank of a job: as rank.mjs, with torch's own store."""

import datetime
import hashlib
import json
import os
import time

import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    world_size=world_size,
    is_master=rank == 0,
    timeout=datetime.timedelta(seconds=60),
)
job = dist.PrefixStore("ep/job", store)

text = job.get("plan")
plan = json.loads(text)
assert plan["format"] == "@ep/plan", plan["format"]
job.set(f"seen/{rank}", f"{hashlib.sha256(text).hexdigest()} {plan['digest']} {plan['worldSize']}")
seen = [job.get(f"seen/{other}").decode() for other in range(world_size)]
print(json.dumps({"rank": rank, "seen": seen}), flush=True)

if job.add("done", 1) == world_size:
    job.set("all done", "")
job.wait(["all done"])
if rank == 0:
    # torch's store does not say who is still connected.
    time.sleep(2)
