#!/usr/bin/env python3
"""The cluster's names for pods of headless Services, as CoreDNS gives them: POD.SERVICE.NAMESPACE.svc.cluster.local is the
address that the Service's Endpoints have for that host name. kubernetes-dns.py ADDRESS KUBECONFIG"""
import json
import socket
import struct
import subprocess
import sys

SUFFIX = ["svc", "cluster", "local"]
TYPE_A = 1
NO_SUCH_NAME = 3
TTL = 1  # seconds; pods come and go


def address_of(labels, kubeconfig):
    if len(labels) != 6 or labels[3:] != SUFFIX:
        return None
    host, service, namespace = labels[:3]
    got = subprocess.run(
        ["kubectl", "--kubeconfig", kubeconfig, "-n", namespace, "get", "endpoints", service, "-o", "json"],
        capture_output=True, timeout=10,
    )
    if got.returncode:
        return None
    for subset in json.loads(got.stdout).get("subsets") or []:
        for address in (subset.get("addresses") or []) + (subset.get("notReadyAddresses") or []):
            if address.get("hostname") == host:
                return address["ip"]
    return None


def answer(query, kubeconfig):
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii").lower())
        at += 1 + query[at]
    question = query[12 : at + 5]
    (wanted,) = struct.unpack(">H", query[at + 1 : at + 3])
    address = address_of(labels, kubeconfig)
    records = b""
    if address and wanted == TYPE_A:
        records = b"\xc0\x0c" + struct.pack(">HHIH", TYPE_A, 1, TTL, 4) + socket.inet_aton(address)
    flags = 0x8180 | (0 if address else NO_SUCH_NAME)
    return query[:2] + struct.pack(">HHHHH", flags, 1, 1 if records else 0, 0, 0) + question + records


def main():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((sys.argv[1], 53))
    while True:
        query, client = server.recvfrom(512)
        try:
            server.sendto(answer(query, sys.argv[2]), client)
        except (IndexError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
            print(f"no answer to {client}: {error}", file=sys.stderr)


main()
