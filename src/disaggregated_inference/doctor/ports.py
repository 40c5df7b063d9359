"""Ports of planned nodes on this machine, and firewalls."""

import http.client
import os
import platform
import re
import socket
import ssl
from collections.abc import Iterator

import msgspec

from disaggregated_inference.api import AnyHealth
from disaggregated_inference.doctor.commands import find_program, output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, ok, unknown
from disaggregated_inference.doctor.plan import ExpectedMachine, ExpectedServer
from disaggregated_inference.timeouts import DoctorTimeouts

_FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def check_ports(plan: ExpectedMachine) -> Iterator[Finding]:
    for server in plan.servers:
        answers = node_answers(server.host, server.port)
        for port in server.ports:
            yield _judge_port(server, port, answers)


def _judge_port(server: ExpectedServer, port: int, answers: bool) -> Finding:
    if is_free(port):
        return ok("port", f"{server.name}: port {port} is free, and no node runs there")
    if answers:
        return ok("port", f"{server.name}: its node has port {port}")
    taker = listener_of(port) or "another process"
    return found("error", "port", f"{server.name}: port {port} is used by {taker}, and no node answers there")


def is_free(port: int) -> bool:
    """On all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def node_answers(host: str, port: int, timeouts: DoctorTimeouts = DoctorTimeouts()) -> bool:
    """By its `/health`. A node with an identity answers by TLS only, and refuses a client without a certificate: that
    it does is enough."""
    connection = http.client.HTTPConnection(host, port, timeout=timeouts.connect_s)
    try:
        connection.request("GET", "/health")
        content = connection.getresponse().read(1 << 16)
        return msgspec.json.decode(content, type=AnyHealth).status is not None
    except TimeoutError:
        return False
    except msgspec.ValidationError:  # of another program
        return False
    except (OSError, http.client.HTTPException, ValueError, msgspec.DecodeError):
        return _speaks_tls(host, port, timeouts)
    finally:
        connection.close()


def _speaks_tls(host: str, port: int, timeouts: DoctorTimeouts) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: only whether TLS answers
    try:
        with socket.create_connection((host, port), timeouts.connect_s) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in (error.reason or "")  # OpenSSL's name of the alert
    except OSError:
        return False


def listener_of(port: int) -> str:
    """Process number and name of the process that listens; empty if this user may not know."""
    try:
        if platform.system() == "Darwin":
            return parse_lsof(output_of("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN"))
        return parse_ss(output_of("ss", "-Hltnp", f"sport = :{port}"))
    except CannotRead:
        return ""


def parse_ss(text: str) -> str:
    match = re.search(r'users:\(\("([^"]+)",pid=(\d+)', text)
    return f"process {match[2]} ({match[1]})" if match else ""


def parse_lsof(text: str) -> str:
    match = re.search(r"^(\S+)\s+(\d+)\s.*\(LISTEN\)", text, re.MULTILINE)
    return f"process {match[2]} ({match[1]})" if match else ""


def check_firewall(plan: ExpectedMachine) -> Iterator[Finding]:
    if platform.system() == "Darwin":
        yield judge_mac_firewall(output_of(_FIREWALL, "--getglobalstate"), output_of(_FIREWALL, "--getblockall"))
    elif os.geteuid() != 0:
        yield unknown("firewall", "only root can read the firewall; run `sudo ufw status`. Paths are measured anyway")
    else:
        yield _linux_firewall()


def judge_mac_firewall(state: str, block_all: str) -> Finding:
    if "disabled" in state.lower() or "State = 0" in state:
        return ok("firewall", "the macOS firewall is off")
    if "enabled" in block_all.lower() or "State = 2" in state:
        what = "the macOS firewall blocks all incoming connections"
        return found("error", "firewall", what, f"sudo {_FIREWALL} --setblockall off")
    what = "the macOS firewall is on: it asks on the screen whether Python may listen"
    return found("warning", "firewall", what, f"sudo {_FIREWALL} --add PYTHON --unblockapp PYTHON")


def _linux_firewall() -> Finding:
    if find_program("ufw") and "Status: active" in (status := output_of("ufw", "status")):
        return judge_ufw(status)
    if find_program("nft"):
        return judge_nft(output_of("nft", "list", "ruleset"))
    if find_program("iptables"):
        return judge_iptables(output_of("iptables", "-S", "INPUT"))
    return ok("firewall", "no firewall is installed")


def judge_ufw(status: str) -> Finding:
    rules = [line for line in status.splitlines() if " ALLOW" in line]
    what = f"ufw is on with {len(rules)} rules that allow connections"
    return found("note", "firewall", f"{what}; the ports of nodes must be among them")


def judge_nft(rules: str) -> Finding:
    return _judge_input(bool(re.search(r"hook input[^}]*?policy drop", rules, re.DOTALL)), "nftables")


def judge_iptables(rules: str) -> Finding:
    return _judge_input("-P INPUT DROP" in rules or "-P INPUT REJECT" in rules, "iptables")


def _judge_input(drops: bool, name: str) -> Finding:
    if drops:
        return found("note", "firewall", f"{name} drops connections that no rule allows")
    return ok("firewall", f"{name} lets connections in")
