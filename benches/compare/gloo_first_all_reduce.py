"""Does the same as accelerator/collective/examples/first_all_reduce.rs, with torch.distributed over gloo. Started by
start.py through torchrun, with the folder for its times.
"""

import os
import sys
import time

began = time.time()
import torch
import torch.distributed as dist

asked = time.time()
dist.init_process_group("gloo")
values = torch.ones(1)
dist.all_reduce(values)
ended = time.time()
assert values.item() == dist.get_world_size()
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as file:
    file.write(f"{began} {asked} {ended}\n")
dist.destroy_process_group()
