"""Drives the provider's simulator with the provider's own Python library.

One argument names the part: life, errors or rate_limit. Every JSON object of a response is compared with the library's
domain class: a field that the library does not know, or one of its fields that is missing, is a defect of the simulator.
"""

import ipaddress
import json
import os
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from hcloud import APIException, Client
from hcloud.actions import Action, ActionFailedException
from hcloud.core.domain import Pagination
from hcloud.images import Image
from hcloud.locations import Location
from hcloud.server_types import ServerType
from hcloud.servers import Server, ServerCreatePublicNetwork
from hcloud.servers.domain import IPv4Address, IPv6Network

# Documented, and not read by the library.
UNREAD = {
    Server: {"load_balancers"},
    Image: {"deleted"},
    IPv4Address: {"id"},
    IPv6Network: {"id"},
}
# Read by the library from older responses, or computed by it.
ABSENT = {ServerType: {"included_traffic"}, IPv6Network: {"network", "network_mask"}}


def client(retries=0):
    made = Client(
        token=os.environ["HCLOUD_TOKEN"],
        api_endpoint=os.environ["HCLOUD_ENDPOINT"],
        poll_interval=0.02,
        poll_max_retries=500,
        timeout=20,
    )
    made._client._retry_max_retries = retries
    made._client._session.hooks["response"].append(keep)
    return made


class Responses:
    last = None


def keep(response, *args, **kwargs):
    Responses.last = response
    assert len(response.headers["X-Correlation-Id"]) >= 16, dict(response.headers)
    limit, remaining, reset = (
        int(response.headers[name]) for name in ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
    )
    now = datetime.now(timezone.utc).timestamp()
    assert 0 <= remaining <= limit and now - 2 < reset < now + 2 * 3600, dict(response.headers)
    if response.ok:
        check_fields(response.json())


def check_fields(body):
    if "server" in body:
        check_server(body["server"])
    for server in body.get("servers", []):
        check_server(server)
    for action in [body.get("action")] + body.get("next_actions", []) + body.get("actions", []):
        if action is not None:
            same_fields(action, Action)
            for resource in action["resources"]:
                assert set(resource) == {"id", "type"}, resource
    for server_type in body.get("server_types", []):
        same_fields(server_type, ServerType)
    for location in body.get("locations", []):
        same_fields(location, Location)
    for image in body.get("images", []):
        same_fields(image, Image)
    if "meta" in body:
        same_fields(body["meta"]["pagination"], Pagination)


def check_server(server):
    same_fields(server, Server)
    same_fields(server["server_type"], ServerType)
    same_fields(server["location"], Location)
    same_fields(server["image"], Image)
    net = server["public_net"]
    assert set(net) == {"ipv4", "ipv6", "floating_ips", "firewalls"}, net
    if net["ipv4"]:
        same_fields(net["ipv4"], IPv4Address)
    if net["ipv6"]:
        same_fields(net["ipv6"], IPv6Network)
    assert set(server["protection"]) == {"delete", "rebuild"}, server["protection"]


def same_fields(found, kind):
    known = set(kind.__api_properties__)
    invented = set(found) - known - UNREAD.get(kind, set())
    missing = known - set(found) - ABSENT.get(kind, set())
    assert not invented and not missing, f"{kind.__name__}: invented {invented}, missing {missing}"


def of(kind, value):
    # In Python, a bool is an int.
    assert type(value) is kind, f"{value!r} is no {kind.__name__}"
    return value


def recent(at):
    now = datetime.now(timezone.utc)
    assert of(datetime, at).tzinfo is not None and now - timedelta(minutes=5) < at <= now + timedelta(seconds=2), at


def control(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["CONTROL_URL"] + path, data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as response:
        return json.load(response)


def fail_next(method, path, fault):
    control("POST", "/faults", {"method": method, "pathContains": path, "times": 1, "fault": fault})


def order(cloud, name, **changes):
    fields = {
        "name": name,
        "server_type": ServerType(name="cpx22"),
        "image": Image(name="debian-12"),
        "location": Location(name="nbg1"),
        "labels": {"slot": "a", "svc.example/machine": name},
        "user_data": "#cloud-config\n{}",
    }
    return cloud.servers.create(**{**fields, **changes})


def settle(response):
    for action in [response.action] + response.next_actions:
        action.wait_until_finished()


def check_values(server, name):
    """The domain object of a running server has values of the right types, also in its parts."""
    assert (of(int, server.id) > 0, server.name, server.status) == (True, name, Server.STATUS_RUNNING)
    recent(server.created)
    kind = server.server_type
    assert (kind.name, of(int, kind.cores), of(float, kind.memory), of(int, kind.disk)) == ("cpx22", 2, 4.0, 80)
    assert (kind.storage_type, kind.cpu_type, kind.architecture) == ("local", "shared", "x86")
    assert of(str, kind.category) and of(str, kind.description)
    offer = next(offer for offer in kind.locations if offer.location.name == "nbg1")
    assert (offer.available, offer.deprecation, of(bool, offer.recommended)) == (True, None, True)
    price = next(price for price in kind.prices if price["location"] == "nbg1")
    assert Decimal(of(str, price["price_monthly"]["net"])) > Decimal(of(str, price["price_hourly"]["gross"])) > 0
    image = server.image
    assert (image.name, image.type, image.status) == ("debian-12", "system", "available")
    assert (image.os_flavor, image.os_version, image.architecture) == ("debian", "12", "x86")
    assert of(datetime, image.created).year >= 2023 and image.protection == {"delete": False}
    place = server.location
    assert (place.name, place.country, place.city, place.network_zone) == ("nbg1", "DE", "Nuremberg", "eu-central")
    assert 49 < of(float, place.latitude) < 50 and 11 < of(float, place.longitude) < 12
    net = server.public_net
    assert ipaddress.IPv4Address(net.ipv4.ip).is_loopback and net.ipv4.blocked is False
    assert net.ipv4.ip in of(str, net.ipv4.dns_ptr)
    assert ipaddress.IPv6Network(net.ipv6.ip).prefixlen == 64 and net.ipv6.dns_ptr == []
    assert len({server.id, of(int, net.primary_ipv4.id), of(int, net.primary_ipv6.id)}) == 3
    assert (net.floating_ips, net.firewalls, server.private_net, server.volumes) == ([], [], [], [])
    assert server.protection == {"delete": False, "rebuild": False}
    assert server.labels == {"slot": "a", "svc.example/machine": name}
    assert (server.primary_disk_size, server.locked, server.rescue_enabled) == (80, False, False)
    assert (server.iso, server.backup_window, server.placement_group) == (None, None, None)
    assert of(int, server.included_traffic) > of(int, server.outgoing_traffic) == of(int, server.ingoing_traffic) == 0


def life():
    cloud = client()
    assert cloud.servers.get_all() == []
    made = order(cloud, "a-0")
    assert (made.server.status, made.server.locked) == (Server.STATUS_INIT, True)
    assert (made.action.command, [after.command for after in made.next_actions]) == ("create_server", ["start_server"])
    assert len(of(str, made.root_password)) >= 16
    settle(made)
    recent(made.action.started)
    recent(made.action.finished)
    assert (made.action.status, made.action.progress, made.action.error) == ("success", 100, None)
    assert made.action.resources == [{"id": made.server.id, "type": "server"}]
    for server in (cloud.servers.get_by_id(made.server.id), cloud.servers.get_by_name("a-0")):
        check_values(server, "a-0")
    listed = {action.id: action.command for action in server.get_actions(status=["success"])}
    assert listed == {made.action.id: "create_server", made.next_actions[0].id: "start_server"}, listed

    # By ids, in the default location, off, and without an address of version 4.
    kind, image = cloud.server_types.get_by_name("cpx22"), cloud.images.get_by_id(server.image.id)
    changes = {"server_type": kind, "image": image, "location": None, "start_after_create": False, "labels": {}}
    net = ServerCreatePublicNetwork(enable_ipv4=False, enable_ipv6=True)
    private = order(cloud, "b-0", public_net=net, **changes)
    assert private.next_actions == []
    settle(private)
    private = cloud.servers.get_by_id(private.server.id)
    assert (private.status, private.public_net.ipv4, private.labels) == (Server.STATUS_OFF, None, {})
    assert private.location.name == "fsn1" and private.public_net.ipv6 is not None

    # Pages, and lists by label, status and name.
    for number in range(1, 5):
        settle(order(cloud, f"a-{number}"))
    page = cloud.servers.get_list(page=2, per_page=2)
    assert len(page.servers) == 2
    places = page.meta.pagination
    assert (places.previous_page, places.next_page, places.last_page, places.total_entries) == (1, 3, 3, 6)
    links = Responses.last.links
    assert links["next"]["url"].endswith("page=3&per_page=2") and links["prev"] and links["last"], links
    first = cloud.servers.get_list(per_page=1).meta.pagination
    assert (first.page, first.previous_page, first.last_page) == (1, None, 6)
    assert len(cloud.servers.get_all()) == 6
    assert len(cloud.servers.get_all(label_selector="slot in (a,b),svc.example/machine!=a-1")) == 4
    assert [found.name for found in cloud.servers.get_all(status=["off", "stopping"])] == ["b-0"]
    assert cloud.servers.get_by_name("a-9") is None

    # Power and type.
    server.shutdown().wait_until_finished()
    server.power_off().wait_until_finished()
    server.reload()
    assert server.status == Server.STATUS_OFF
    server.change_type(ServerType(name="cpx32"), upgrade_disk=False).wait_until_finished()
    server.reload()
    assert (server.server_type.name, server.server_type.disk, server.primary_disk_size) == ("cpx32", 160, 80)
    for act in (server.power_on, server.reboot, server.reset):
        act().wait_until_finished()
    server.reload()
    assert server.status == Server.STATUS_RUNNING
    assert server.update(labels={"slot": "b"}).labels == {"slot": "b"}

    # An action that fails at the provider.
    fail_next("POST", "/actions/poweroff", {"kind": "actionError"})
    failing = server.power_off()
    try:
        failing.wait_until_finished()
        raise AssertionError("the failed action was not reported")
    except ActionFailedException as failed:
        assert failed.action.error == {"code": "action_failed", "message": "Action failed"}, failed.action.error
        recent(failed.action.finished)

    # The catalogue.
    assert [kind.name for kind in cloud.server_types.get_all()] == ["cpx12", "cpx22", "cpx32", "cpx42", "cpx52"]
    assert cloud.server_types.get_by_id(kind.id).name == "cpx22"
    assert cloud.server_types.get_list(per_page=2, page=2).server_types[0].name == "cpx32"
    assert cloud.locations.get_by_name("hel1").city == "Helsinki" and len(cloud.locations.get_all()) == 6
    assert cloud.locations.get_by_id(4).name == "ash"
    assert cloud.images.get_by_name_and_architecture("debian-13", "x86").os_version == "13"

    for server in cloud.servers.get_all():
        deleted = server.delete()
        deleted.wait_until_finished()
        assert deleted.command == "delete_server" and deleted.status == "success"
    assert cloud.servers.get_all() == []


def refused(code, status, call):
    try:
        call()
    except APIException as error:
        assert (error.code, Responses.last.status_code) == (code, status), (error, Responses.last.status_code)
        assert of(str, error.message) and error.correlation_id == Responses.last.headers["X-Correlation-Id"]
        return error.details
    raise AssertionError(f"{code} was expected")


def errors():
    cloud = client()
    made = order(cloud, "a")
    server = made.server
    assert refused("uniqueness_error", 409, lambda: order(cloud, "a")) == {"fields": [{"name": "name"}]}
    refused("locked", 423, server.power_off)
    refused("locked", 423, server.delete)
    settle(made)

    settle(order(cloud, "b"))
    assert "limits" in refused("resource_limit_exceeded", 403, lambda: order(cloud, "c"))
    cloud.servers.get_by_name("b").delete().wait_until_finished()

    server.change_protection(delete=True, rebuild=True).wait_until_finished()
    server.reload()
    assert server.protection == {"delete": True, "rebuild": True}
    refused("protected", 423, server.delete)
    refused("invalid_input", 422, lambda: server.change_protection(delete=False, rebuild=True))
    server.change_protection(delete=False, rebuild=False).wait_until_finished()

    refused("server_not_stopped", 422, lambda: server.change_type(ServerType(name="cpx32"), upgrade_disk=False))
    server.power_off().wait_until_finished()
    refused("invalid_server_type", 422, lambda: server.change_type(ServerType(name="cpx12"), upgrade_disk=False))
    refused("invalid_input", 422, lambda: server.change_type(ServerType(name="cx1"), upgrade_disk=False))

    for field, bad in {
        "name": {"name": "not a host name"},
        "server_type": {"server_type": ServerType(name="cx1")},
        "image": {"image": Image(name="debian-1")},
        "location": {"location": Location(name="moon1")},
        "labels": {"labels": {"hetzner.cloud/a": "b"}},
        "user_data": {"user_data": "x" * (32 * 1024 + 1)},
    }.items():
        details = refused("invalid_input", 422, lambda: order(cloud, **{"name": "d", **bad}))
        assert details["fields"][0]["name"] == field and details["fields"][0]["messages"], details
    refused("invalid_input", 422, lambda: cloud.servers.get_all(label_selector="a in b"))
    refused("invalid_input", 422, lambda: cloud.servers.get_list(page="x"))
    refused("invalid_input", 422, lambda: cloud.request("POST", "/servers", json={"name": "d"}))
    refused("invalid_input", 422, lambda: cloud.request("GET", "/actions"))
    refused("json_error", 400, lambda: cloud.request("POST", "/servers", data="{"))

    refused("not_found", 404, lambda: cloud.servers.get_by_id(1))
    refused("not_found", 404, lambda: cloud.servers.get_by_id("a"))
    refused("not_found", 404, lambda: cloud.actions.get_by_id(1))
    refused("not_found", 404, lambda: cloud.images.get_by_id(1))
    refused("not_found", 404, lambda: cloud.request("GET", "/no_such_route"))
    refused("method_not_allowed", 405, lambda: cloud.request("PATCH", "/servers"))
    removed = refused("deprecated_api_endpoint", 410, lambda: cloud.request("GET", "/datacenters"))
    assert removed["announcement"].startswith("https://docs.hetzner.cloud/changelog#"), removed

    stranger = client()
    stranger._client._headers["Authorization"] = "Bearer wrong"
    refused("unauthorized", 401, stranger.servers.get_all)

    # What only the real provider decides is scripted.
    for status, code in [(412, "placement_error"), (412, "resource_unavailable"), (403, "maintenance"),
                         (409, "conflict"), (500, "server_error"), (503, "unavailable"), (504, "timeout")]:
        fail_next("POST", "/servers", {"kind": "status", "status": status, "code": code})
        refused(code, status, lambda: order(cloud, "e"))
    assert cloud.servers.get_by_name("e") is None

    fault = {"kind": "status", "status": 429, "code": "rate_limit_exceeded", "resetInSeconds": 30}
    fail_next("GET", "/servers", fault)
    refused("rate_limit_exceeded", 429, cloud.servers.get_all)
    headers = Responses.last.headers
    wait = int(headers["RateLimit-Reset"]) - datetime.now(timezone.utc).timestamp()
    assert headers["RateLimit-Remaining"] == "0" and 25 < wait <= 31, dict(headers)


def rate_limit():
    cloud = client()
    remaining = []
    for _ in range(3):
        cloud.servers.get_list()
        assert Responses.last.headers["RateLimit-Limit"] == "3"
        remaining.append(int(Responses.last.headers["RateLimit-Remaining"]))
    assert remaining == sorted(remaining, reverse=True) and remaining[0] == 2, remaining
    while Responses.last.status_code != 429:
        try:
            cloud.servers.get_list()
        except APIException as error:
            assert error.code == "rate_limit_exceeded", error
    assert Responses.last.headers["RateLimit-Remaining"] == "0"
    # The library repeats a refused call after a pause, as the provider recommends.
    patient = client(retries=5)
    for _ in range(3):
        patient.servers.get_list()


{"life": life, "errors": errors, "rate_limit": rate_limit}[sys.argv[1]]()
