#!/usr/bin/env python3
"""Resolves the names of pods of headless Services, like CoreDNS: POD.SERVICE.NAMESPACE.svc.cluster.local is the address
of that host name in the Service's Endpoints. kubernetes-dns.py ADDRESS FOLDER, with the folder of the cluster."""
import json
import pathlib
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request

SUFFIX = ["svc", "cluster", "local"]
TYPE_A = 1
NO_SUCH_NAME = 3
TTL = 1  # seconds; pods come and go


def endpoints(namespace, service, folder):
    url = f"https://{sys.argv[1]}:6443/api/v1/namespaces/{namespace}/endpoints/{service}"
    token = (folder / "admin.token").read_text().strip()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=4, context=context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        return {}


def address_of(labels, folder):
    if len(labels) != 6 or labels[3:] != SUFFIX:
        return None
    host, service, namespace = labels[:3]
    for subset in endpoints(namespace, service, folder).get("subsets") or []:
        for address in (subset.get("addresses") or []) + (subset.get("notReadyAddresses") or []):
            if address.get("hostname") == host:
                return address["ip"]
    return None


def answer(query, folder):
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii").lower())
        at += 1 + query[at]
    question = query[12 : at + 5]
    (wanted,) = struct.unpack(">H", query[at + 1 : at + 3])
    address = address_of(labels, folder)
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
            server.sendto(answer(query, pathlib.Path(sys.argv[2])), client)
        except (IndexError, UnicodeDecodeError, OSError) as error:
            print(f"no answer to {client}: {error}", file=sys.stderr)


main()
