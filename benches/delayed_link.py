"""A network link with a delay, for kernels without netem.

delayed_link.py NAMESPACE SWITCH PORT DELAY makes the device eth0 in NAMESPACE and the device PORT in
SWITCH. It passes frames from the host to the switch after DELAY (such as 500us or 1ms), and the other way at
once. It prints a line when both devices are up, and runs until it is killed. Use it through shaped_link.sh.
"""

import collections
import ctypes
import fcntl
import os
import struct
import sys
import threading
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
# Large frames, so that the interpreter is no bottleneck.
MTU = 61000


def tap(namespace, name):
    with open(f"/var/run/netns/{namespace}") as space:
        if LIBC.setns(space.fileno(), CLONE_NEWNET) != 0:
            sys.exit(f"the namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    os.system(f"ip link set {name} mtu {MTU} txqueuelen 10000")
    return device


def carry(source, target, delay):
    frames, arrived = collections.deque(), threading.Semaphore(0)

    def listen():
        while True:
            frame = os.read(source, 65536)
            frames.append((time.monotonic() + delay, frame))
            arrived.release()

    def speak():
        while True:
            arrived.acquire()
            due, frame = frames.popleft()
            left = due - time.monotonic()
            if left > 0:
                time.sleep(left)
            try:
                os.write(target, frame)
            except OSError:
                pass  # A device that is down loses frames.

    for work in (listen, speak):
        threading.Thread(target=work, daemon=True).start()


def seconds(text):
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text[: -len(unit)]) * size
    sys.exit(f"expected a delay such as 500us or 1ms, found {text!r}")


host, switch, port, delay = sys.argv[1], sys.argv[2], sys.argv[3], seconds(sys.argv[4])
inner, outer = tap(host, "eth0"), tap(switch, port)
carry(inner, outer, delay)
carry(outer, inner, 0.0)
print("ready", flush=True)
threading.Event().wait()
