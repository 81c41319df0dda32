"""A healthy host and a way that is fine, for rules to be tried on."""

import msgspec

from ragtag.doctor.facts import Device, HostFacts, Interface, Port, Torch, Way

RTX3090 = Device(
    kind="cuda",
    name="NVIDIA GeForce RTX 3090",
    uuid="GPU-3090",
    memory_bytes=24 << 30,
    driver="550.54",
    capability="8.6",
    dtypes=("fp32", "fp16", "bf16", "tf32"),
)
P40 = Device(kind="cuda", name="Tesla P40", index=1, uuid="GPU-40", driver="550.54", capability="6.1")
CPU = Device(kind="cpu", name="some CPU", uuid="CPU-1")
HEALTHY = HostFacts(
    host="alpha",
    ragtag="0.1.0",
    python="3.11.7",
    torch=Torch(version="2.13.0+cpu"),
    devices=(CPU,),
    cores=8,
    cores_allowed=8,
    memory_bytes=64 << 30,
    open_files=65536,
    open_files_most=1 << 20,
    shared_memory_bytes=32 << 30,
    resolves_to=("10.0.0.1",),
    interfaces=(
        Interface(name="lo", addresses=("127.0.0.1", "::1"), mtu=65536),
        Interface(name="eth0", addresses=("10.0.0.1",), mtu=1500),
        Interface(name="eth1", addresses=("10.1.0.1",), mtu=1500),
        Interface(name="eth2", up=False),
    ),
    ports=(Port(number=29500, setting="", free=True),),
)
OTHER = msgspec.structs.replace(
    HEALTHY,
    host="beta",
    resolves_to=("10.0.0.2",),
    interfaces=(Interface(name="eth0", addresses=("10.0.0.2",), mtu=1500),),
)
WAY = Way(
    source="alpha",
    target="beta",
    address="10.0.0.2",
    port=29470,
    interface="eth0",
    source_address="10.0.0.1",
    ok=True,
    control=True,
    latency_s=0.0002,
)


def changed(value, **changes):
    return msgspec.structs.replace(value, **changes)
