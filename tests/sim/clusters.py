from ragtag.core.cluster_file import parse_cluster
from ragtag.sim.cluster import VirtualCluster, virtual_cluster

FOUR = """
[[device]]
name = "a"
count = 2
[[device]]
name = "b"
speed = 0.5
{b}
[[device]]
name = "c"
speed = 0.25
{c}
"""


def four(emulate: str = "", *, b: str = "", c: str = "", batch: int = 44, **settings) -> VirtualCluster:
    text = f"[emulate]\nsample_ms = 40\noptimizer_ms = 8\n{emulate}\n" + FOUR.format(b=b, c=c)
    return virtual_cluster(parse_cluster(text), batch=batch, **settings)


def many(num_devices: int, emulate: str = "jitter = 0.05") -> VirtualCluster:
    text = f"[emulate]\nsample_ms = 40\noptimizer_ms = 8\n{emulate}\n"
    for kind, speed, part in (("fast", 1.0, 0.5), ("slow", 0.4, 0.5)):
        text += f'[[device]]\nname = "{kind}"\nspeed = {speed}\ncount = {int(part * num_devices)}\n'
    return virtual_cluster(parse_cluster(text), batch=16 * num_devices)
